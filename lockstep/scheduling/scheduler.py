"""Scheduler: decides which requests run, wait or move to host memory. Torch-free.

schedule() runs ahead of the results. Waiting and preempted requests share one queue, ordered by
priority and then by arrival. Its head is served or all others wait, so no request starves. The cost
of a schedule depends on the running rows, not on the length of the queue. When pages run short, the
running row that is last in that order moves to host memory; nothing is computed twice.

A request ends with "length" at max_model_len tokens, at max_tokens, or when it alone would fill the
whole pool of pages. Pages are reserved up to that length only, so a lone row always fits: there is
no deadlock, and where a request ends does not depend on the number of drafts. Tokens written past
that length go to the null page and are never read for a token that counts.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.cache.cache import Cache
from lockstep.cache.groups import CacheSeq, root_key
from lockstep.errors import CapacityError, ConfigError, RequestError
from lockstep.outputs import ForcedMismatch, TokenSource
from lockstep.scheduling.chunks import FORCED_WINDOWS, split_budget
from lockstep.scheduling.draft_length import DraftLengthPolicy, FixedDraftLength
from lockstep.scheduling.grammar import Grammar, MaskQuery, fill_masks
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import (
    Admission,
    MaskedRow,
    PageGrant,
    PromptChunk,
    Results,
    RowResult,
    RowSpec,
    Schedule,
    Swap,
)
from lockstep.scheduling.waiting_queue import WaitingQueue


@dataclass(eq=False)
class ScheduledRequest:
    """Scheduling state of a request.

    key: (priority, arrival number), the order of service; preemption takes victims from its end.
    row: 0 while it waits. max_committed: upper bound of the tokens that the device has committed
    after all launched steps. in_flight: lower bound of the tokens that launched steps emit and that
    are not read yet. saved: pages in host memory. has_begun: a chunk of its prompt was scheduled.
    """

    request: Request
    seq: CacheSeq
    key: tuple[int, int]
    row: int = 0
    max_committed: int = 0
    in_flight: int = 0
    saved: int = 0
    has_begun: bool = False
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.request.prompt_token_ids)

    @property
    def in_prompt(self) -> bool:
        """Return whether prompt tokens are still to be scheduled."""
        return self.max_committed < self.length

    @property
    def num_forced(self) -> int:
        """Return the tokens that a forced step may commit: the last one and the forced tokens after
        it; 0 where a decode step continues the answer.
        """
        # Exact: until all forced tokens are committed, no step has an unknown number of tokens.
        remaining = self.request.forced_end - self.max_committed
        return 0 if self.in_prompt or remaining < 2 else min(remaining, FORCED_WINDOWS[-1])

    @property
    def will_finish(self) -> bool:
        """Return whether the steps in flight end the request whatever they emit."""
        request = self.request
        return request.num_tokens + self.in_flight >= request.max_total_tokens

    def need(self, reach: int) -> int:
        """Return the tokens that pages must cover before its next step, which writes `reach`
        tokens.
        """
        reach += self.num_forced
        return min(max(self.max_committed, self.length) + reach, self.request.max_total_tokens)


class Scheduler:
    """Scheduler of one cache. schedule() may run ahead of update() by any number of steps.

    query_len: maximum tokens that a decoding row brings to a step (K + 1). row_buckets: numbers of
    rows that decode steps are padded to, ascending; None pads nothing. draft_policy: chooses the
    drafts per step; None: always query_len - 1. drafts_in_pages: a draft module writes drafts to
    the rows' pages, one window after the step's own tokens. adapters: digest of each adapter by its
    name. forced_budget: maximum rows * window of a forced step. budget: maximum tokens of a decode
    step and a prompt step. min_chunk: tokens of a prompt's first chunk at least. align: prompt
    chunks end on multiples of it: the page size with recurrent layers, else 1. reach: tokens past
    the committed ones that a decode step may write. preempt_next: requests to preempt in the next
    schedule, for tests. dropped, answers: fields of the next schedule.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        query_len: int,
        row_buckets: tuple[int, ...] | None = None,
        draft_policy: DraftLengthPolicy | None = None,
        policy: str = "fcfs",
        preempt_every: int = 0,
        drafts_in_pages: bool = False,
        adapters: Mapping[str, str] | None = None,
        forced_budget: int = FORCED_WINDOWS[-1],
    ) -> None:
        if policy not in ("fcfs", "priority"):
            raise ConfigError(
                f"scheduling_policy={policy!r} is not allowed; allowed: fcfs, priority. Choose one."
            )
        grid = cache.config.page_size
        if cache.state and max_num_batched_tokens < grid:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is not allowed; allowed: {grid} "
                "or more with recurrent layers, since their prompt chunks end on whole pages. "
                "Raise it."
            )
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.drafts_total = 0  # rows of steps that brought drafts
        self.accepted_at = [0] * (query_len - 1)  # accepted drafts, by their index in a row
        self.query_len = query_len
        self.drafts_in_pages = drafts_in_pages
        self.adapters = adapters or {}
        self.forced_budget = forced_budget
        self.reach = 2 * query_len if drafts_in_pages else query_len
        self.row_buckets = row_buckets
        self.draft_policy = draft_policy or FixedDraftLength(query_len - 1)
        self.policy = policy
        self.preempt_every = preempt_every
        self.min_chunk = min(grid, max_num_batched_tokens)
        self.align = grid if cache.state else 1
        self.free_rows = list(range(max_num_seqs, 0, -1))
        self.entries: dict[str, ScheduledRequest] = {}
        self.running: list[ScheduledRequest] = []
        self.queue: WaitingQueue[ScheduledRequest] = WaitingQueue()
        # Requests of the queue whose state is in host memory.
        self.preempted: dict[str, ScheduledRequest] = {}
        self.preempt_next: set[str] = set()
        self.suspects: list[ScheduledRequest] = []  # the first one runs alone
        self.launched: dict[int, dict[int, ScheduledRequest]] = {}
        self.drafts_ready = 0
        self.dropped: list[str] = []
        self.answers: list[list[int]] = []
        self.ticks = 0
        self.arrivals = 0
        self.preemptions = 0

    @property
    def num_running(self) -> int:
        """Return the number of requests with a row, audits excluded."""
        return len(self.running) - self.is_auditing

    @property
    def is_auditing(self) -> bool:
        """Return whether an audit has a row; an audit runs alone."""
        return bool(self.running) and self.running[0].request.is_audit

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that have not begun."""
        return len(self.queue) - len(self.preempted)

    @property
    def num_swapped(self) -> int:
        """Return the number of preempted requests in host memory."""
        return len(self.preempted)

    def check(self, request: Request) -> None:
        """Raise RequestError or CapacityError if the request can never be served.

        Reads no mutable state, so any thread may call it.
        """
        if request.adapter and request.adapter not in self.adapters:
            allowed = ", ".join(map(repr, self.adapters)) or "none"
            raise RequestError(
                f"adapter={request.adapter!r} is not allowed; allowed: {allowed} (lora_modules). "
                "Name one of them, or leave it out for the base model.",
                "adapter",
            )
        length = len(request.prompt_token_ids)
        capacity = self.cache.capacity
        if not 1 <= length < self.max_model_len:
            raise RequestError(
                f"prompt has {length} tokens; allowed: 1 to {self.max_model_len - 1} "
                f"(max_model_len={self.max_model_len}). Change the prompt or raise max_model_len.",
                "prompt",
            )
        if length >= capacity:
            raise CapacityError(
                f"prompt is too long: {length} tokens > {capacity - 1} maximum, since the cache "
                f"has {self.cache.paged.pool.total} pages of {self.cache.config.page_size} tokens. "
                "Shorten the prompt or give the cache more pages."
            )
        if request.forced_end > min(self.max_model_len, capacity):
            max_forced = min(self.max_model_len, capacity) - length
            raise RequestError(
                f"forced_token_ids has {len(request.forced_token_ids)} tokens; allowed: at most "
                f"{max_forced}, what max_model_len and the cache leave after {length} prompt "
                "tokens. Force fewer tokens or raise max_model_len.",
                "forced_token_ids",
            )

    def add(self, request: Request) -> None:
        """Queue a request. Raises what check() raises, and RequestError for an id in use."""
        if request.id in self.entries:
            raise RequestError(
                f"request_id={request.id!r} is not allowed; allowed: ids of no running request. "
                "Choose another.",
                "request_id",
            )
        self.check(request)
        request.max_len = min(self.max_model_len, self.cache.capacity)
        self.arrivals += 1
        rank = request.priority if self.policy == "priority" else 0
        seq = self._cache_seq(request)
        self._enqueue(ScheduledRequest(request, seq, (rank, self.arrivals)))

    def _enqueue(self, entry: ScheduledRequest) -> None:
        """Queue a request that has no row and nothing in host memory."""
        self.queue.push(entry)
        self.entries[entry.request.id] = entry
        if entry.request.is_suspect:
            # One that failed alone comes first, so that a second failure from outside is unlikely.
            insort(self.suspects, entry, key=lambda e: (-e.request.failures, e.key))

    def restart(self, request_id: str) -> None:
        """Queue a request again from its first token, at its place in the order.

        Its tokens so far are forced. Results in flight are ignored.
        """
        entry = self.entries[request_id]
        self._finish(entry)
        entry.request.restart()
        self._enqueue(ScheduledRequest(entry.request, self._cache_seq(entry.request), entry.key))

    def _cache_seq(self, request: Request) -> CacheSeq:
        """Return a new cache record of a request."""
        # Prompt log-probabilities need every position computed, so no prefix is reused.
        reuse = request.params.prompt_logprobs is None and not request.is_audit
        return CacheSeq(
            prompt=request.prompt_token_ids,
            output=request.output_token_ids,
            root=self.cache_root(request),
            reuse=reuse,
            publish=not request.is_audit,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
        )

    def cache_root(self, request: Request) -> bytes:
        """Return the parent key of a request's first page."""
        digest = self.adapters[request.adapter] if request.adapter else ""
        return root_key(request.cache_salt, digest)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request in any phase; results in flight are ignored. Returns None for an unknown
        id.
        """
        entry = self.entries.get(request_id)
        if entry is None:
            return None
        entry.request.finish_reason = reason
        self._finish(entry)
        return entry.request

    def begun(self) -> list[str]:
        """Return the ids of requests that have a row, or are preempted."""
        begun = [*self.running, *self.preempted.values()]
        return [entry.request.id for entry in sorted(begun, key=lambda e: e.key)]

    def force_preempt(self, request_id: str) -> None:
        """Preempt a request at the next schedule, if it runs then."""
        if request_id in self.entries:
            self.preempt_next.add(request_id)

    def has_work(self) -> bool:
        """Return whether a request is unfinished, or workers must hear of one that ended."""
        return bool(self.entries or self.dropped or self.answers)

    def schedule(self) -> Schedule:
        """Return the next schedule. Later schedules treat its steps as done."""
        self.ticks += 1
        schedule = Schedule(self.ticks, self.dropped, self.answers)
        self.dropped = []
        self.answers = []
        rows: dict[int, ScheduledRequest] = {}
        self._isolate_suspect()
        self._preempt_for_tests(schedule)
        self._reserve(schedule)
        self._serve_queue(schedule)
        for entry in sorted(self.running, key=lambda e: e.row):
            if not (entry.in_prompt or entry.num_forced or entry.will_finish):
                schedule.decode.append(entry.row)
                rows[entry.row] = entry
                # An upper bound until update() knows how many drafts were accepted.
                entry.max_committed += self.query_len
                entry.in_flight += 1
                self._request_masks(schedule, entry)
        self._choose_drafts(schedule, any(entry.request.speculate for entry in rows.values()))
        forcing = [entry for entry in self.running if entry.num_forced and not entry.will_finish]
        rows.update(self._plan_forced(schedule, forcing))
        rows.update(self._plan_prompt(schedule))
        if rows:
            self.launched[schedule.tick] = rows
        schedule.evicted, schedule.fetched = self.cache.end_schedule()
        return schedule

    def num_cached_tokens(self, schedule: Schedule) -> int:
        """Return the cached tokens of all rows of a decode step. Call before update()."""
        rows = self.launched.get(schedule.tick, {})
        return sum(rows[row].request.num_tokens - 1 for row in schedule.decode)

    def update(self, schedule: Schedule, results: Results) -> list[Request]:
        """Give the results of a schedule to its requests; return those that got tokens."""
        rows = self.launched.pop(schedule.tick, {})
        if schedule.decode:
            accepted = [results.rows[row].num_accepted for row in schedule.decode]
            self.draft_policy.observe(
                schedule.padded_rows,
                schedule.num_drafts,
                schedule.drafts_ready,
                accepted,
                results.decode_ms,
            )
        # A request may have ended, and its row may have a new owner, since the launch.
        alive = {row: e for row, e in rows.items() if self.entries.get(e.request.id) is e}
        updated = []
        for row in schedule.decode:
            if row in alive:
                entry = alive[row]
                result = results.rows[row]
                entry.max_committed -= self.query_len - len(result.tokens)
                entry.request.metrics.num_steps += 1
                entry.request.metrics.num_draft_tokens += result.num_drafted
                entry.request.metrics.num_accepted_tokens += result.num_accepted
                self._count_drafts(result)
                updated.append(self._append_tokens(entry, result))
        for row in schedule.forced:
            if row in alive:
                entry = alive[row]
                result = results.rows[row]
                # All of the window's tokens were counted as in flight; _append_tokens() takes one.
                entry.in_flight -= len(result.tokens) - 1
                entry.request.metrics.num_steps += not entry.request.is_replaying
                updated.append(self._append_tokens(entry, result))
        for chunk in schedule.prompt:
            if chunk.row in alive:
                entry = alive[chunk.row]
                result = results.rows.get(chunk.row, RowResult([]))
                entry.request.prompt_logprobs.extend(result.prompt_logprobs)
                if chunk.last:
                    updated.append(self._append_tokens(entry, result))
        return updated

    def _count_drafts(self, result: RowResult) -> None:
        """Count the accepted drafts of a row by their index."""
        self.drafts_total += result.num_drafted > 0
        for index in range(result.num_accepted):
            self.accepted_at[index] += 1

    def forget_launched(self) -> None:
        """Drop the launched schedules whose results will not be read."""
        self.launched.clear()

    def _append_tokens(self, entry: ScheduledRequest, result: RowResult) -> Request:
        """Append the tokens of a row to its request, which may end by them."""
        request = entry.request
        entry.in_flight -= 1
        first = len(request.output_token_ids)
        mismatch = None
        if result.mismatch is not None:
            at, chosen = result.mismatch
            mismatch = ForcedMismatch(first + at, result.tokens[at], chosen)
        taken = request.append(result.tokens, result.logprobs, mismatch)
        num_forced = min(max(len(request.forced_token_ids) - first, 0), len(result.tokens))
        forced: list[TokenSource] = ["forced"] * num_forced
        request.token_sources += (forced + result.sources[num_forced:])[:taken]
        if len(request.output_token_ids) > request.num_resumed:
            request.failures = 0
        self.cache.commit(entry.seq, request.num_tokens - 1)
        if request.finish_reason is not None:
            self._finish(entry)
            # Drafts from a salted answer would reveal it to other users by their timing.
            if not (request.cache_salt or request.is_audit):
                self.answers.append(request.output_token_ids)
        return request

    def _choose_drafts(self, schedule: Schedule, wants_drafts: bool) -> None:
        """Choose the drafts and the padded rows of the decode step.

        wants_drafts: any row wants drafts; without one there is nothing to choose.
        """
        count = len(schedule.decode)
        if not count:
            return
        schedule.padded_rows = self._padded_rows(count)
        policy = self.draft_policy
        schedule.num_drafts = (
            policy.choose(schedule.padded_rows) if wants_drafts else policy.min_drafts
        )
        schedule.drafts_ready = min(schedule.num_drafts, self.drafts_ready)
        self.drafts_ready = schedule.num_drafts

    def _padded_rows(self, count: int) -> int:
        """Return the rows that a decode step of `count` rows is padded to."""
        return next((bucket for bucket in self.row_buckets or () if bucket >= count), count)

    def _leave_row(self, entry: ScheduledRequest) -> None:
        self.cache.release(entry.seq)
        self.running.remove(entry)
        self.free_rows.append(entry.row)
        entry.row = 0

    def _finish(self, entry: ScheduledRequest) -> None:
        del self.entries[entry.request.id]
        self.preempt_next.discard(entry.request.id)
        if entry in self.suspects:
            self.suspects.remove(entry)
        if self.preempted.pop(entry.request.id, None) is not None:
            self.dropped.append(entry.request.id)
        if entry.row:
            self._leave_row(entry)
        else:
            self.queue.remove(entry)

    def _isolate_suspect(self) -> None:
        """Free the rows of all requests but the first suspect, which runs alone until it has a new
        token."""
        while self.suspects and not self.suspects[0].request.is_suspect:
            self.suspects.pop(0)
        if self.suspects:
            for entry in list(self.running):
                if entry is not self.suspects[0]:
                    self.restart(entry.request.id)

    def _preempt(self, schedule: Schedule, entry: ScheduledRequest) -> None:
        """Move a row to host memory: only the pages that hold committed tokens."""
        used = self.cache.pages_for(min(entry.max_committed, entry.request.max_total_tokens))
        pages = entry.seq.pages[:used]
        schedule.swap_out.append(Swap(entry.row, entry.request.id, pages, entry.seq.slot))
        # The row's pages go to others, so its grants of this schedule are void.
        schedule.grants = [grant for grant in schedule.grants if grant.row != entry.row]
        self._leave_row(entry)
        entry.saved = used
        entry.request.metrics.num_preemptions += 1
        self.preemptions += 1
        self.preempted[entry.request.id] = entry
        self.queue.push(entry)

    def _preempt_for_tests(self, schedule: Schedule) -> None:
        """Preempt for tests: requested rows, and one row of the running ones every Nth schedule."""
        victims = [entry for entry in self.running if entry.request.id in self.preempt_next]
        self.preempt_next.clear()
        if self.preempt_every and self.ticks % self.preempt_every == 0 and self.running:
            index = self.ticks // self.preempt_every % len(self.running)
            victims = list({*victims, self.running[index]})
        for entry in sorted(victims, key=lambda e: e.key):
            self._preempt(schedule, entry)

    def _reserve(self, schedule: Schedule) -> None:
        """Reserve pages for all decoding rows in the queue's order; the last rows are preempted."""
        for entry in sorted(self.running, key=lambda e: e.key):
            if not entry.row or entry.in_prompt or entry.will_finish:
                continue
            column = len(entry.seq.pages)
            while not self.cache.reserve(entry.seq, entry.need(self.reach)):
                victim = max(self.running, key=lambda e: e.key)
                self._preempt(schedule, victim)
                if victim is entry:
                    break
            if entry.row and len(entry.seq.pages) > column:
                schedule.grants.append(PageGrant(entry.row, column, entry.seq.pages[column:]))

    def _serve_queue(self, schedule: Schedule) -> None:
        """Start requests from the head of the queue until one does not fit.

        The cost depends on the rows that run and start, never on the number of waiting requests.
        """
        if self.suspects:
            if not self.suspects[0].row:
                self._start(schedule, self.suspects[0])
            return
        prompts = [entry for entry in self.running if entry.in_prompt]
        decoding = self._padded_rows(len(self.running) - len(prompts))
        budget = self._prompt_budget(decoding * self.query_len)
        passed_over: list[ScheduledRequest] = []
        victims: list[ScheduledRequest] = []
        while (entry := self.queue.head()) is not None:
            if entry.will_finish:
                self.queue.remove(entry)
                passed_over.append(entry)
                continue
            # A victim of this schedule does not return in it, and no later request overtakes it.
            if entry in victims:
                break
            is_new = entry.request.id not in self.preempted
            if is_new and not self._has_chunk_for(entry, prompts, budget):
                break
            if not self._start_preempting(schedule, entry, victims):
                break
            if entry.in_prompt:
                prompts.append(entry)
        for entry in passed_over:
            self.queue.push(entry)

    def _has_chunk_for(
        self, entry: ScheduledRequest, prompts: Sequence[ScheduledRequest], budget: int
    ) -> bool:
        """Return whether a new prompt gets a chunk next to the prompts that precede it.

        Prompts that began earlier leave half of the step to new ones, which may be shorter.
        prompts: those of rows. budget: tokens of the prompt step.
        """
        preceding = [e for e in prompts if e.key < entry.key]
        begun = sum(e.length - e.max_committed for e in preceding if e.has_begun)
        new = sum(e.length - e.max_committed for e in preceding if not e.has_begun)
        reserved = min(begun, max(budget // 2, self.min_chunk)) + new
        is_full = len(preceding) >= self.budget // self.min_chunk
        return not is_full and reserved + self.min_chunk <= budget

    def _start_preempting(
        self, schedule: Schedule, entry: ScheduledRequest, victims: list[ScheduledRequest]
    ) -> bool:
        """Start a request, preempting rows of lower priority for it; return whether it has a row.

        victims: extended by the preempted rows, even where they were not enough.
        """
        while not self._start(schedule, entry):
            victim = max(self.running, key=lambda e: e.key, default=None)
            if victim is None or victim.key[0] <= entry.key[0]:
                return False
            self._preempt(schedule, victim)
            victims.append(victim)
        return True

    def _start(self, schedule: Schedule, entry: ScheduledRequest) -> bool:
        """Give a waiting request a row, pages and a slot; one page per running row stays spare."""
        if not self.free_rows:
            return False
        seq = entry.seq
        request = entry.request
        need = entry.need(self.reach)
        spare = len(self.running)
        returns = request.id in self.preempted
        if returns:
            need = max(need, entry.saved * self.cache.config.page_size)
            if not self.cache.readmit(seq, need, spare):
                return False
        else:
            cached = self.cache.admit(seq, need, spare)
            if cached is None:
                return False
            if not request.num_resumed:
                request.metrics.num_cached_tokens = cached
            entry.max_committed = cached
        self.queue.remove(entry)
        entry.row = self.free_rows.pop()
        self.running.append(entry)
        pages = list(seq.pages)
        if returns:
            del self.preempted[request.id]
            schedule.swap_in.append(Swap(entry.row, request.id, pages, seq.slot))
        else:
            schedule.admissions.append(self._admission(entry, pages))
        return True

    @staticmethod
    def _admission(entry: ScheduledRequest, pages: list[int]) -> Admission:
        """Return the message that gives a row to a new request."""
        seq = entry.seq
        spec = RowSpec.of(entry.request)
        return Admission(entry.row, spec, pages, seq.slot, entry.max_committed, seq.source)

    @staticmethod
    def _request_masks(schedule: Schedule, entry: ScheduledRequest) -> None:
        """Ask for the masks of a row whose grammar may forbid its next tokens."""
        request = entry.request
        if request.grammar is not None and request.is_constrained:
            known = len(request.prompt_token_ids) + request.grammar.accepted
            schedule.masked.append(MaskedRow(entry.row, request.id, known))

    def fill_masks(self, queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
        """Answer the mask queries of a step of the latest schedule, see `FillMasks`."""
        return fill_masks(self._grammar_of, queries, memory)

    def _grammar_of(self, request_id: str) -> Grammar:
        grammar = self.entries[request_id].request.grammar
        assert grammar is not None
        return grammar

    def _plan_forced(
        self, schedule: Schedule, forcing: Sequence[ScheduledRequest]
    ) -> dict[int, ScheduledRequest]:
        """Plan windows of forced tokens, in the queue's order; return their rows.

        forcing: rows with forced tokens to commit. All windows of a step have one length, to which
        shorter ones are padded.
        """
        chosen: list[ScheduledRequest] = []
        for entry in sorted(forcing, key=lambda e: e.key):
            longest = max(entry.num_forced, schedule.forced_len)
            window = next(window for window in FORCED_WINDOWS if window >= longest)
            if window * (len(chosen) + 1) > self.forced_budget:
                break
            schedule.forced_len = window
            chosen.append(entry)
        for entry in chosen:
            schedule.forced.append(entry.row)
            self._request_masks(schedule, entry)
            count = entry.num_forced
            entry.max_committed += count
            entry.in_flight += count
        return {entry.row: entry for entry in chosen}

    def _plan_prompt(self, schedule: Schedule) -> dict[int, ScheduledRequest]:
        """Plan chunks of prompts, in one ragged step; return its rows.

        Chunks end on the page grid where state recurs, else anywhere. They also end where the cache
        wants a snapshot for prompts with a common prefix.
        """
        size = self.cache.config.page_size
        prompts = sorted((e for e in self.running if e.in_prompt), key=lambda e: e.key)
        stops = [self.cache.prompt_end(e.seq, e.max_committed) for e in prompts]
        remaining = [stop - e.max_committed for stop, e in zip(stops, prompts, strict=True)]
        # The snapshot from which a new prompt continues is pinned in its first schedule only.
        minimum = [
            0 if entry.has_begun else min(rest, self.min_chunk)
            for entry, rest in zip(prompts, remaining, strict=True)
        ]
        decoded = schedule.padded_rows * (schedule.num_drafts + 1)
        # Rows that returned after new prompts got theirs decode in this schedule, too.
        budget = max(self._prompt_budget(decoded), sum(minimum))
        lengths = split_budget(remaining, minimum, budget, self.align)
        chosen = [(entry, n) for entry, n in zip(prompts, lengths, strict=True) if n]
        for entry, length in chosen:
            start = entry.max_committed
            end = start + length
            point = end // size * size
            wants_snapshot = self.cache.wants_snapshot(entry.seq, start, point)
            slot = self.cache.snapshot(entry.seq, point) if wants_snapshot else 0
            last = end == entry.length
            schedule.prompt.append(
                PromptChunk(entry.row, start, length, last, entry.seq.source, slot)
            )
            entry.seq.source = 0  # later chunks continue from the row's own state
            entry.max_committed = end
            entry.has_begun = True
            entry.in_flight += last
            if last:
                self._request_masks(schedule, entry)
        for entry, _ in chosen:
            self.cache.commit(entry.seq, entry.max_committed)
        return {entry.row: entry for entry, _ in chosen}

    def _prompt_budget(self, decoded: int) -> int:
        """Return the tokens of a prompt step next to a decode step of `decoded` tokens.

        It is half of the budget at least, so that no load of decode steps stops prompts.
        """
        return max(self.budget - decoded, self.budget // 2, self.min_chunk)
