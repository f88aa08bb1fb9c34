"""Engine: requests in, tokens out. An iteration schedules, launches, then reads results.

The host runs `steps_in_flight` steps ahead of the results that it has read; the row table on the
device is the truth.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.cache.block_log import BlockEvent
from lockstep.cache.cache import Cache
from lockstep.cache.host_tier import PAGES, SLOTS
from lockstep.engine.audit_record import AuditRecord
from lockstep.engine.auditor import Auditor
from lockstep.engine.executor import Executor, PendingResults
from lockstep.engine.scheduler_factory import cache_config, make_scheduler
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.errors import EngineDeadError, LockstepError, RequestError
from lockstep.scheduling.draft_length import DraftLengthPolicy
from lockstep.scheduling.request import (
    MAX_FAILED_REQUESTS,
    Request,
    check_forced,
    check_ids,
)
from lockstep.scheduling.schedule import Schedule

MAX_FAILURES = 5
"""Consecutive steps that may fail: a fault that repeats is not caused by one request."""
STEP_FAILED = (
    "the engine failed in a step that worked on this request, and synthetic_acceptance, whose "
    "tokens are not the model's, cannot go on from them. Send the request again; the log names the "
    "cause."
)


@dataclass(frozen=True)
class Counted:
    """Progress of a request when its statistics were last counted.

    at: time.monotonic() of that moment; None before the first.
    """

    at: float | None = None
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def _refuse_with_synthetic_tokens(request: Request) -> None:
    """Raise RequestError for what depends on tokens being the model's."""
    field = None
    if request.forced_token_ids:
        field = "forced_token_ids"
    elif request.grammar:
        # An engine's process gets the grammar without structured_outputs.
        has_budget = request.params.thinking_token_budget is not None
        field = "thinking_token_budget" if has_budget else "structured_outputs"
    if field is not None:
        raise RequestError(
            f"{field} is not allowed with synthetic_acceptance, whose tokens are not the model's. "
            "Leave one of them out.",
            field,
        )


class Engine:
    """Control plane of one model: it owns a scheduler and an executor.

    on_begin: called with the ids of requests before the step that gives them a row. auditor: queue
    of audits; the loop that runs the engine adds them when there is no other work.

    All methods belong to one thread, except check() and drain_stats(). Counters change under a lock
    that is never taken while the device is waited for.
    """

    def __init__(
        self,
        executor: Executor,
        draft_policy: DraftLengthPolicy | None = None,
        preempt_every: int = 0,
    ) -> None:
        self.executor = executor
        self.config = executor.config
        self.plan = executor.plan
        self.numerics = self.plan.numerics
        self.fingerprint = self.plan.fingerprint
        self.vocab_size = executor.vocab_size
        self.scheduler = make_scheduler(
            self.plan,
            cache_config(self.plan, self.config.enable_prefix_caching),
            draft_policy=draft_policy,
            policy=self.config.scheduling_policy,
            preempt_every=preempt_every,
        )
        events = self.config.kv_events_config
        self.block_log = (
            self.scheduler.cache.log_blocks() if events is not None and events.is_on else None
        )
        self.auditor = Auditor(self.config.audit, partial(AuditRecord.of, self.config, self.plan))
        self.stats = Stats()
        self._counting = threading.Lock()
        self._in_flight: deque[tuple[Schedule, PendingResults]] = deque()
        self._counted: dict[str, Counted] = {}
        self._failures = 0
        self._failed_requests = 0
        self.on_begin: Callable[[Sequence[str]], None] | None = None

    @property
    def facts(self) -> Any:
        """Facts about the engine, as the executor gives them."""
        return self.executor.facts

    def check(self, request: Request) -> None:
        """Raise RequestError or CapacityError if the request can never be served. Thread-safe."""
        check_ids(request, self.vocab_size)
        self.scheduler.check(request)
        check_forced(request)
        drafting = self.config.speculative_config
        if drafting is not None and drafting.synthetic_acceptance is not None:
            _refuse_with_synthetic_tokens(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what check() raises, and RequestError for an id in use."""
        self.check(request)
        with self._counting:
            self.scheduler.add(request)
            if request.num_resumed:
                # The lost engine counted the prompt and the tokens that the client has.
                metrics = request.metrics
                self._counted[request.id] = Counted(
                    None,
                    request.num_resumed,
                    metrics.num_draft_tokens,
                    metrics.num_accepted_tokens,
                )
            elif not request.is_audit:
                self.stats.prompt_tokens_total += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> Request | None:
        """Abort a request in any phase; its tokens stay. Returns None for an unknown id."""
        return self._end(request_id, "abort")

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, in host memory too. Running requests keep their pages."""
        with self._counting:
            self.scheduler.cache.drop_cached()

    def drain_blocks(self) -> Sequence[BlockEvent]:
        """Return the events of cached blocks since the last call; none where they are off."""
        return () if self.block_log is None else self.block_log.drain()

    def _end(self, request_id: str, reason: str) -> Request | None:
        with self._counting:
            request = self.scheduler.abort(request_id, reason)
            if request is not None and not request.is_audit:
                self.stats.requests_success_total[reason] += 1
        self._counted.pop(request_id, None)
        return request

    def has_work(self) -> bool:
        """Return whether step() has anything to do."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[Request]:
        """Run one iteration and return the requests that got tokens or finished."""
        with self._counting:
            schedule = self.scheduler.schedule()
            self.stats.steps_total += bool(schedule.decode)
        if schedule.admissions:
            self._begin([admission.spec.id for admission in schedule.admissions])
        if not schedule.is_empty:
            pending = self.executor.execute(schedule, self.scheduler.fill_masks)
            if schedule.has_steps:
                self._in_flight.append((schedule, pending))
        # Without new steps nothing else would read the ones in flight.
        idle = not schedule.computes
        # A request that arrives during an audit waits for one step at most.
        max_in_flight = 1 if self.scheduler.is_auditing else self.plan.steps_in_flight
        if self._in_flight and (idle or len(self._in_flight) >= max_in_flight):
            return self._read()
        return []

    def _begin(self, ids: Sequence[str]) -> None:
        """Handle the first rows of requests."""
        now = time.monotonic()
        for request_id in ids:
            metrics = self.scheduler.entries[request_id].request.metrics
            if metrics.scheduled_time is None:
                metrics.scheduled_time = now
        if self.on_begin is not None:
            self.on_begin(ids)

    def _read(self) -> list[Request]:
        """Read the results of the oldest schedule and give them to the requests."""
        schedule, pending = self._in_flight.popleft()
        results = pending.result()  # waits for the device; takes no lock
        self._failures = self._failed_requests = 0
        with self._counting:
            if results.decode_ms is not None:
                step = DecodeStep(
                    seconds=results.decode_ms / 1e3,
                    rows=len(schedule.decode),
                    drafts=schedule.num_drafts,
                    context=self.scheduler.num_cached_tokens(schedule),
                )
                self.stats.observe("decode_steps", step)
            is_audit = self.scheduler.is_auditing
            updated = self.scheduler.update(schedule, results)
            if not is_audit:
                self._count_tokens(schedule, updated)
        return updated

    def _count_tokens(self, schedule: Schedule, updated: Sequence[Request]) -> None:
        """Count the tokens of a schedule and of the requests that it updated."""
        now = time.monotonic()
        generated = self.stats.generation_tokens_total
        for request in updated:
            self._count(request, now)
        tokens = sum(chunk.length for chunk in schedule.prompt)
        tokens += self.stats.generation_tokens_total - generated
        self.stats.observe("iteration_tokens", tokens)

    def _count(self, request: Request, now: float) -> None:
        has_ended = request.finish_reason is not None
        if not has_ended and len(request.output_token_ids) <= request.num_resumed:
            return  # the client has these tokens, and they were counted
        stats = self.stats
        metrics = request.metrics
        drafted = metrics.num_draft_tokens
        accepted = metrics.num_accepted_tokens
        before = self._counted.get(request.id, Counted())
        num_tokens = max(len(request.output_token_ids), request.num_resumed)
        after = Counted(now, num_tokens, drafted, accepted)
        stats.generation_tokens_total += after.tokens - before.tokens
        stats.draft_tokens_total += after.drafted - before.drafted
        stats.accepted_tokens_total += after.accepted - before.accepted
        if before.at is not None:
            stats.observe("itl_seconds", now - before.at)
        elif after.tokens and metrics.first_token_time is None:
            metrics.first_token_time = now
            stats.observe("ttft_seconds", now - metrics.arrival_time)
        self._counted[request.id] = after
        if has_ended:
            self._counted.pop(request.id, None)
            metrics.finished_time = now
            stats.observe("e2e_seconds", now - metrics.arrival_time)
            stats.requests_success_total[str(request.finish_reason)] += 1

    def drain_stats(self) -> Stats:
        """Return a copy of the counters, from any thread; histogram lists start anew."""
        with self._counting:
            return self.refresh_stats().drain()

    def refresh_stats(self) -> Stats:
        """Return the counters, with the gauges of the scheduler and the cache."""
        stats = self.stats
        scheduler = self.scheduler
        cache = self.scheduler.cache
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        stats.num_swapped = scheduler.num_swapped
        stats.preemptions_total = scheduler.preemptions
        stats.pages = cache.paged.pool.total
        stats.pages_used = cache.paged.pool.used
        stats.prefix_hits_total = cache.hit_tokens
        stats.prefix_queries_total = cache.query_tokens
        self._count_moves(cache)
        stats.audited_requests_total = self.auditor.num_audited
        stats.audit_differences_total = self.auditor.num_differences
        stats.audits_dropped_total = self.auditor.num_dropped
        stats.num_audits_pending = self.auditor.num_pending
        stats.num_audit_records = self.auditor.num_records
        stats.drafts_total = scheduler.drafts_total
        stats.accepted_at = tuple(scheduler.accepted_at)
        return stats

    def _count_moves(self, cache: Cache) -> None:
        """Copy the cache's counters of host memory into the statistics."""
        stats = self.stats
        sizes = {PAGES: self.plan.page_bytes, SLOTS: self.plan.slot_bytes}
        host_pools = [(g.pool.host, sizes[g.pool.host.name]) for g in cache.groups]
        stats.host_pages = cache.host.size
        stats.host_pages_used = cache.host.used
        stats.host_hits_total = cache.host_hit_tokens
        stats.host_queries_total = cache.host_query_tokens
        stats.offloaded_total = sum(pool.num_evicted for pool, _ in host_pools)
        stats.offloaded_bytes_total = sum(pool.num_evicted * size for pool, size in host_pools)
        stats.fetched_total = sum(pool.num_fetched for pool, _ in host_pools)
        stats.fetched_bytes_total = sum(pool.num_fetched * size for pool, size in host_pools)

    def explain(self) -> dict[str, Any]:
        """Return the plan, per layer the op, its backend and why others were refused, and notes
        about the checkpoint's weight format.
        """
        return {
            "plan": {k: str(v) if k == "model_path" else v for k, v in vars(self.plan).items()},
            "fingerprint": self.fingerprint,
            **self.executor.explain(),
        }

    def run(self, requests: list[Request], on_update: Callable[[Request], None]) -> None:
        """Serve requests until they end; on_update is called for each that got tokens or finished.

        If one request is refused, none runs. If a step or on_update raises, all end.
        """
        added = []
        try:
            for request in requests:
                self.add(request)
                added.append(request.id)
        except Exception:
            for request_id in added:
                self.abort(request_id)
            raise
        try:
            while self.has_work():
                for request in self.step():
                    on_update(request)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """End every request and drop the prefix cache: after a failed step its content is
        unknown.
        """
        for request_id in list(self.scheduler.entries):
            self.abort(request_id)
        self._forget()

    def recover(self) -> list[Request]:
        """Recover from a step that raised; return the requests that end, with their `error` set.

        The content of the rows on the device is unknown then. So requests that have or had a row
        begin again, with their tokens so far as forced tokens, and no cached prefix is kept;
        waiting requests keep waiting. A request whose runs fail again and again ends, which
        explains the failures. An audit runs alone: it is dropped, and its failure does not count.
        Raises EngineDeadError where an empty step fails as well, or steps fail again and again.
        """
        audit = self.auditor.drop()
        if audit is None:
            self._failures += 1
        else:
            self.abort(audit.id)
        ended = [r for r in map(self._restart, self.scheduler.begun()) if r is not None]
        self._failed_requests += len(ended)
        if ended:
            self._failures = 0
        self._forget()
        if self._failed_requests > MAX_FAILED_REQUESTS:
            raise EngineDeadError(f"{self._failed_requests} requests in a row failed")
        if self._failures >= MAX_FAILURES:
            raise EngineDeadError(f"{self._failures} steps in a row failed")
        try:
            self.scheduler.cache.check()
            self.executor.probe()
        except Exception as error:
            # Other errors may contain what only the operator should read.
            cause = f": {error}" if isinstance(error, LockstepError) else ""
            raise EngineDeadError(
                f"a step failed, and so did an empty one after it{cause}"
            ) from error
        return ended

    def _restart(self, request_id: str) -> Request | None:
        """Queue a request of a failed step again; return it where it ends instead."""
        request = self.scheduler.entries[request_id].request
        request.failures += 1
        drafting = self.config.speculative_config
        is_synthetic = drafting is not None and drafting.synthetic_acceptance is not None
        error = request.failure
        if error is None and is_synthetic and request.output_token_ids:
            error = STEP_FAILED
        if error is not None:
            request.error = error
            return self._end(request_id, "error")
        with self._counting:
            self.scheduler.restart(request_id)
            self.stats.resumed_total += 1
        return None

    def _forget(self) -> None:
        """Drop the steps in flight and the prefix cache."""
        self._in_flight.clear()
        self.scheduler.forget_launched()
        with self._counting:
            self.scheduler.cache.drop_cached()
