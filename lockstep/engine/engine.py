"""The engine: requests in, tokens out. One iteration schedules, launches, then reads.

The host runs `steps_in_flight` steps ahead of what it has read; the device holds the truth.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.cache.cache import Cache
from lockstep.cache.host_tier import PAGES, SLOTS
from lockstep.engine.executor import Executor, PendingResults
from lockstep.engine.scheduler_factory import cache_config, make_scheduler
from lockstep.engine.stats import DecodeStep, Stats
from lockstep.errors import EngineDeadError, RequestError
from lockstep.scheduling.draft_length import DraftLengthPolicy
from lockstep.scheduling.request import Request, check_ids
from lockstep.scheduling.schedule import Schedule

MAX_FAILURES = 5
"""Steps that may fail in a row: a fault that comes again and again is not of one request."""
STEP_FAILED = (
    "the engine failed in a step that worked on this request. Send the request again; "
    "the log names the cause."
)


@dataclass(frozen=True)
class Counted:
    """How far a request was when it was last counted; at: time.monotonic, None before that."""

    at: float | None = None
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Engine:
    """A model that serves requests.

    Belongs to one thread (AsyncEngine's, for instance), but for drain_stats, which may come from
    any: whatever it counts changes under a lock that no step holds while the device works.
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
        self.stats = Stats()
        self._counting = threading.Lock()
        self._in_flight: deque[tuple[Schedule, PendingResults]] = deque()
        self._counted: dict[str, Counted] = {}
        self._failures = 0

    @property
    def facts(self) -> Any:
        """Facts about the engine, as the executor gives them."""
        return self.executor.facts

    def check(self, request: Request) -> None:
        """Raise RequestError or CapacityError if the request can never be served. Any thread may
        call it."""
        check_ids(request, self.vocab_size)
        drafting = self.config.speculative_config
        if request.grammar and drafting and drafting.synthetic_acceptance is not None:
            has_form = request.params.structured_outputs is not None
            field = "structured_outputs" if has_form else "thinking_token_budget"
            raise RequestError(
                f"{field} is not allowed with synthetic_acceptance, whose tokens are not the "
                "model's. Leave one of them out.",
                field,
            )
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what check() raises, and RequestError for an id that is taken."""
        self.check(request)
        with self._counting:
            self.scheduler.add(request)
            self.stats.prompt_tokens_total += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request wherever it is; what it has emitted stays. None if it is not known."""
        return self._end(request_id, "abort")

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, those in host memory too. Running requests keep their pages."""
        with self._counting:
            self.scheduler.cache.forget()

    def _end(self, request_id: str, reason: str) -> Request | None:
        with self._counting:
            request = self.scheduler.abort(request_id, reason)
            if request is not None:
                self.stats.requests_success_total[reason] += 1
        self._counted.pop(request_id, None)
        return request

    def has_work(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[Request]:
        """One iteration; returns the requests that got tokens or finished."""
        with self._counting:
            schedule = self.scheduler.schedule()
            self.stats.steps_total += bool(schedule.decode)
        for admission in schedule.admissions:
            request = self.scheduler.entries[admission.spec.id].request
            request.metrics.scheduled_time = time.monotonic()
        if not schedule.is_empty:
            pending = self.executor.execute(schedule, self.scheduler.fill_masks)
            if schedule.has_steps:
                self._in_flight.append((schedule, pending))
        idle = not (schedule.decode or schedule.prompt)
        if self._in_flight and (idle or len(self._in_flight) >= self.plan.steps_in_flight):
            return self._read()
        return []

    def _read(self) -> list[Request]:
        """Reads the oldest schedule's steps and gives their tokens to their requests."""
        schedule, pending = self._in_flight.popleft()
        results = pending.result()
        self._failures = 0
        with self._counting:
            if results.decode_ms is not None:
                kind = (len(schedule.decode), schedule.num_drafts, self.scheduler.context(schedule))
                self.stats.observe("decode_steps", DecodeStep(results.decode_ms / 1e3, *kind))
            touched = self.scheduler.update(schedule, results)
            now = time.monotonic()
            generated = self.stats.generation_tokens_total
            for request in touched:
                self._count(request, now)
            tokens = sum(chunk.length for chunk in schedule.prompt)
            tokens += self.stats.generation_tokens_total - generated
            self.stats.observe("iteration_tokens", tokens)
        return touched

    def _count(self, request: Request, now: float) -> None:
        stats = self.stats
        metrics = request.metrics
        drafted = metrics.num_draft_tokens
        accepted = metrics.num_accepted_tokens
        before = self._counted.get(request.id, Counted())
        after = Counted(now, len(request.output_token_ids), drafted, accepted)
        stats.generation_tokens_total += after.tokens - before.tokens
        stats.draft_tokens_total += after.drafted - before.drafted
        stats.accepted_tokens_total += after.accepted - before.accepted
        if before.at is not None:
            stats.observe("itl_seconds", now - before.at)
        elif after.tokens:
            metrics.first_token_time = now
            stats.observe("ttft_seconds", now - metrics.arrival_time)
        self._counted[request.id] = after
        if request.finish_reason is not None:
            self._counted.pop(request.id, None)
            metrics.finished_time = now
            stats.observe("e2e_seconds", now - metrics.arrival_time)
            stats.requests_success_total[request.finish_reason] += 1

    def drain_stats(self) -> Stats:
        """A copy of the counters, taken in any thread; histogram lists start anew."""
        with self._counting:
            return self.refresh_stats().drain()

    def refresh_stats(self) -> Stats:
        """The counters, gauges of the scheduler and the cache included."""
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
        stats.drafts_total = scheduler.drafted_rows
        stats.accepted_at = tuple(scheduler.accepted_at)
        return stats

    def _count_moves(self, cache: Cache) -> None:
        """What was evicted to host memory and came back, as the cache has counted it."""
        stats = self.stats
        sizes = {PAGES: self.plan.page_bytes, SLOTS: self.plan.slot_bytes}
        shelves = [(g.pool.host, sizes[g.pool.host.name]) for g in cache.groups]
        stats.host_pages = cache.host.size
        stats.host_pages_used = cache.host.used
        stats.host_hits_total = cache.host_hit_tokens
        stats.host_queries_total = cache.host_query_tokens
        stats.offloaded_total = sum(shelf.num_out for shelf, _ in shelves)
        stats.offloaded_bytes_total = sum(shelf.num_out * size for shelf, size in shelves)
        stats.fetched_total = sum(shelf.num_back for shelf, _ in shelves)
        stats.fetched_bytes_total = sum(shelf.num_back * size for shelf, size in shelves)

    def explain(self) -> dict[str, Any]:
        """The plan; per layer: op, backend, and why the others were refused; and notes: what the
        checkpoint's weight format asks for and is not done."""
        return {
            "plan": {k: str(v) if k == "model_path" else v for k, v in vars(self.plan).items()},
            "fingerprint": self.fingerprint,
            **self.executor.explain(),
        }

    def run(self, requests: list[Request], on_update: Callable[[Request], None]) -> None:
        """Serves requests to their ends, calling on_update for each that got tokens or finished.

        All or none: if one is refused, none of them runs. If a step or on_update raises, all end.
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
        """Ends every request, and forgets what is cached: a step that failed may not have run."""
        for request_id in list(self.scheduler.entries):
            self.abort(request_id)
        self._forget()

    def recover(self) -> list[Request]:
        """After a step that raised: ends with "error" what has begun, so that all else goes on.

        What the device holds of a row is not known then, so every request ends that has a row or
        had one, and no prefix is remembered; those that wait keep waiting. Raises EngineDeadError
        where an empty step fails as well, or steps fail again and again.
        """
        self._failures += 1
        failed = [self._end(request_id, "error") for request_id in self.scheduler.begun()]
        self._forget()
        if self._failures >= MAX_FAILURES:
            raise EngineDeadError(f"{self._failures} steps in a row failed")
        try:
            self.scheduler.cache.check()
            self.executor.probe()
        except Exception as error:
            raise EngineDeadError("a step failed, and so did an empty one after it") from error
        ended = [request for request in failed if request is not None]
        for request in ended:
            request.error = STEP_FAILED
        return ended

    def _forget(self) -> None:
        """Drops the steps in flight and what is cached for reuse."""
        self._in_flight.clear()
        self.scheduler.forget_launched()
        with self._counting:
            self.scheduler.cache.forget()
