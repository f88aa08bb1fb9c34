"""Invariants of every schedule, checked even if a violation would not change an output.

They concern the host only: nothing here synchronizes with the device, which may run steps later.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from lockstep.cache.cache import Cache
from lockstep.cache.groups import CacheSeq, root_key
from lockstep.cache.host_tier import PAGES, SLOTS, Key
from lockstep.check.scenarios.service_order import ServiceOrder
from lockstep.check.scenarios.step_plans import StepPlans
from lockstep.engine.engine import Engine
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Admission, PromptChunk, Results, Schedule
from lockstep.scheduling.scheduler import ScheduledRequest, Scheduler
from lockstep.worker.executor import worker_of

AT_ONCE = "at once"
ANOTHER_ROW = "another row"
LATER = "later"
"""Ways in which a preempted request returns: as the scheduler likes, under another row, later."""
HELD_TICKS = 3
"""Schedules in which a preempted request that should return later gets no row."""


class InvariantError(Exception):
    """Violation of an invariant of the engine while a scenario ran."""


class ScheduleInvariants:
    """Model of a scheduler's pages and snapshots, updated with each of its schedules."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._pages: dict[int, list[int]] = {}
        self._cached: dict[str, dict[int, Key]] = {}
        self._host: dict[int, tuple[str, Key, int]] = {}

    def begin(self) -> None:
        """Record the cached pages before the next schedule, which may evict them."""
        for group in self.scheduler.cache.groups:
            self._cached[group.pool.host.name] = dict(group.pool.key_of)

    def check(self, schedule: Schedule) -> None:
        """Raise InvariantError if this schedule, the next after begin(), violates an invariant."""
        self._update_pages(schedule)
        for admission in schedule.admissions:
            self._check_admission(admission)
        self._check_host_moves(schedule)
        for entry in self.scheduler.running:
            if self._pages.get(entry.row) != entry.seq.pages:
                raise InvariantError(
                    f"row {entry.row} has the pages {entry.seq.pages}, but the schedules gave it "
                    f"{self._pages.get(entry.row)}"
                )
        state = self.scheduler.cache.state
        if state is None:
            return
        check_snapshots(schedule, {entry.seq.slot for entry in self.scheduler.running})
        if state.pins:
            raise InvariantError("snapshots are still pinned after the schedule")
        for chunk in schedule.prompt:
            self._check_chunk(chunk)

    def _update_pages(self, schedule: Schedule) -> None:
        """Update the pages of rows in the order in which the worker applies the schedule."""
        for swap in schedule.swap_out:
            if self._pages.pop(swap.row, [])[: len(swap.pages)] != swap.pages:
                raise InvariantError(f"row {swap.row} is saved from pages that it does not have")
        for swap in schedule.swap_in:
            self._pages[swap.row] = list(swap.pages)
        for admission in schedule.admissions:
            self._pages[admission.row] = list(admission.pages)
        rows = {entry.row for entry in self.scheduler.running}
        for grant in schedule.grants:
            if grant.row not in rows:
                raise InvariantError(f"row {grant.row} gets pages but is not running")
            self._pages[grant.row][grant.column :] = grant.pages

    def _check_admission(self, admission: Admission) -> None:
        """Check that the cached pages of a request have the keys of its prompt and salt."""
        size = self.scheduler.cache.config.page_size
        known = self.scheduler.cache.paged.pool.key_of
        request = self.scheduler.entries[admission.spec.id].request
        fresh = CacheSeq(request.prompt_token_ids, root=self._root(request))
        for index, page in enumerate(admission.pages[: admission.start // size]):
            if known.get(page) != fresh.key(index, size):
                raise InvariantError(
                    f"page {page} is not page {index} of the prompt of row {admission.row}"
                )

    def _root(self, request: Request) -> bytes:
        """Return the root of the page keys that a request must have."""
        return root_key(request.cache_salt, self.scheduler.adapters.get(request.adapter, ""))

    def _check_host_moves(self, schedule: Schedule) -> None:
        """Check that a page loaded from host memory is the one that was evicted with its key."""
        for group in self.scheduler.cache.groups:
            name = group.pool.host.name
            key_by_unit = self._cached.get(name, {})
            for move in schedule.evicted.get(name, ()):
                if move.unit not in key_by_unit:
                    raise InvariantError(f"{name}: {move.unit} was not cached when it was evicted")
                for index, page in enumerate(move.host_pages):
                    self._host[page] = (name, key_by_unit[move.unit], index)
            key_of = group.pool.key_of
            for move in schedule.fetched.get(name, ()):
                contents = [self._host.get(page) for page in move.host_pages]
                if contents != [(name, key_of[move.unit], index) for index in range(len(contents))]:
                    raise InvariantError(
                        f"{name}: {move.unit} is loaded from host pages with other contents"
                    )

    def _check_chunk(self, chunk: PromptChunk) -> None:
        """Check that a chunk reads the state at its start and saves it at its last grid point."""
        size = self.scheduler.cache.config.page_size
        end = chunk.start + chunk.length
        point = end // size * size
        for slot, tokens in ((chunk.state_src, chunk.start), (chunk.snapshot_slot, point)):
            if slot and not self._is_state(slot, chunk, tokens):
                raise InvariantError(f"slot {slot} is not the snapshot after {tokens} tokens")
        if chunk.snapshot_slot and point <= chunk.start:
            raise InvariantError(
                f"a chunk from {chunk.start} to {end} writes a snapshot at {point}"
            )

    def _is_state(self, slot: int, chunk: PromptChunk, tokens: int) -> bool:
        """Return whether a slot is the snapshot after this number of prompt tokens."""
        cache = self.scheduler.cache
        request = next(e.request for e in self.scheduler.running if e.row == chunk.row)
        if cache.state is None or tokens < cache.config.page_size:
            return False
        fresh = CacheSeq(request.prompt_token_ids, root=self._root(request))
        size = cache.config.page_size
        return cache.state.pool.key_of.get(slot) == fresh.key(tokens // size - 1, size)


@dataclass(frozen=True)
class Resumption:
    """Cached prefix of an admitted request.

    tokens: cached tokens. from_host: pages of them came from host memory. branch: tokens of cached
    pages whose state had no snapshot.
    """

    tokens: int
    from_host: bool
    branch: int


class CheckedScheduler(Scheduler):
    """Scheduler that checks the invariants of each of its schedules.

    returns: how a preempted request gets a row again, by request id; AT_ONCE for other_rows. Memory
    seems short to it for as long as that needs. returned: how requests returned, by id.
    resumptions: cached prefixes of first admissions, by id. requests: all that were added.
    num_preempted: preemptions by id. total_preempted: all of them. num_cached: cached tokens of all
    admissions. num_joint_steps: joint steps whose results were read. plans: check of its steps.
    """

    def __init__(self, cache: Cache, **options: Any) -> None:
        super().__init__(cache, **options)
        self.invariants = ScheduleInvariants(self)
        self.returns: dict[str, str] = {}
        self.returned: dict[str, set[str]] = {}
        self.resumptions: dict[str, Resumption] = {}
        self.requests: list[Request] = []
        self.num_preempted: Counter[str] = Counter()
        self.total_preempted = 0
        self.num_cached = 0
        self.num_joint_steps = 0
        self._order = ServiceOrder(self.policy)
        self.plans = StepPlans(self)
        self._started: list[str] = []
        self._begun: list[Request] = []
        self._origins: dict[bytes, tuple[str, str]] = {}
        self._is_forcing = False
        self._left: dict[str, tuple[int, int]] = {}
        self._row_of_partner: dict[str, int] = {}

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvariantError if it shares prefixes with another salt's."""
        super().add(request)
        origin = (request.cache_salt, request.adapter)
        known = self._origins.setdefault(self.cache_root(request), origin)
        if known != origin:
            raise InvariantError(f"pages of (salt, adapter) {origin} have the keys of {known}")
        self._order.add(request)
        self.requests.append(request)
        # An id that is used again begins anew.
        self.num_preempted.pop(request.id, None)
        self._row_of_partner.pop(request.id, None)

    def schedule(self) -> Schedule:
        """Return the next schedule. Raises InvariantError if it violates an invariant."""
        self.invariants.begin()
        self.plans.begin()
        self._started = []
        schedule = super().schedule()
        self.invariants.check(schedule)
        raise_if(self.plans.fault(schedule))
        raise_if(self._revealed_answer(schedule))
        waiting = [e.request.id for e in self.entries.values() if not (e.row or e.will_finish)]
        # A request that makes the engine fail again and again runs alone, whatever its place.
        if not self.suspects:
            raise_if(self._order.wrong_starts(self._started, waiting))
        fetched = {move.unit for move in schedule.fetched.get(PAGES, ())}
        for admission in schedule.admissions:
            resumption = Resumption(
                admission.start,
                not fetched.isdisjoint(admission.pages),
                self.entries[admission.spec.id].seq.branch,
            )
            # A failed step makes a request begin again: its first prefix counts.
            self.resumptions.setdefault(admission.spec.id, resumption)
            self.num_cached += admission.start
        return schedule

    def update(self, schedule: Schedule, results: Results) -> list[Request]:
        """Count joint steps, which are the decode steps without a time."""
        self.num_joint_steps += bool(schedule.decode) and results.decode_ms is None
        return super().update(schedule, results)

    def _revealed_answer(self, schedule: Schedule) -> str | None:
        """Return which salted answer drafters learn from, or None.

        Drafts of it would show by their timing what was asked under the salt.
        """
        learned = {id(answer) for answer in schedule.answers}
        for request in self.requests:
            if request.cache_salt and id(request.output_token_ids) in learned:
                return f"drafters learn the answer of request {request.id}, which has a salt"
        return None

    def _preempt_for_tests(self, plan: Schedule) -> None:
        """Preempt the rows that the scenario names, whatever their place in the order."""
        self._add_partners()
        self._is_forcing = True
        super()._preempt_for_tests(plan)
        self._is_forcing = False

    def _add_partners(self) -> None:
        """Preempt one more row with each request that should not return to its own at once.

        The other request gets the first one's row in this schedule. So results of a step in flight
        belong to a row that has a new owner.
        """
        running = list(self.running)
        for entry in running:
            wanted = self.returns.get(entry.request.id, AT_ONCE)
            if entry.request.id in self.preempt_next and wanted != AT_ONCE:
                ids = (other.request.id for other in running)
                partner = next((other for other in ids if other not in self.preempt_next), None)
                if partner is not None:
                    self.preempt_next.add(partner)
                    self._row_of_partner[partner] = entry.row

    def _preempt(self, plan: Schedule, entry: ScheduledRequest) -> None:
        """Record the row that a request leaves."""
        if not self._is_forcing:
            running = [other.request.id for other in self.running]
            raise_if(self._order.wrong_victim(entry.request.id, running))
        self._left[entry.request.id] = (entry.row, self.ticks)
        self.num_preempted[entry.request.id] += 1
        self.total_preempted += 1
        super()._preempt(plan, entry)
        # Steps in flight may have written pages that the host has not read about.
        written = min(entry.max_committed, entry.request.max_total_tokens)
        if entry.saved < self.cache.pages_for(written):
            raise InvariantError(
                f"request {entry.request.id} is preempted with {entry.saved} pages, and launched "
                f"steps may have written {written} tokens"
            )

    def _start(self, plan: Schedule, entry: ScheduledRequest) -> bool:
        """Start a request, a preempted one in the way that it should return."""
        request_id = entry.request.id
        if request_id not in self.preempted:
            return self._start_new(plan, entry)
        if request_id not in self._left:
            return super()._start(plan, entry)
        if not self._order_free_rows(request_id):
            return False
        row, tick = self._left[request_id]
        if not super()._start(plan, entry):
            return False
        self._started.append(request_id)
        ways = self.returned.setdefault(request_id, set())
        ways.add(ANOTHER_ROW if entry.row != row else AT_ONCE)
        if self.ticks > tick + 1:
            ways.add(LATER)
        del self._left[request_id]
        self._row_of_partner.pop(request_id, None)
        return True

    def _order_free_rows(self, request_id: str) -> bool:
        """Put the row that a preempted request should get last: the last one of the stack is taken.

        Returns False if the request should wait.
        """
        row, tick = self._left[request_id]
        target = self._row_of_partner.get(request_id)
        if target in self.free_rows:
            self.free_rows = [*(free for free in self.free_rows if free != target), target]
            return True
        wanted = self.returns.get(request_id, AT_ONCE)
        if wanted == LATER and self.ticks <= tick + HELD_TICKS:
            return False
        other_rows = [free for free in self.free_rows if free != row]
        if wanted == ANOTHER_ROW and row in self.free_rows:
            if not other_rows and self.ticks <= tick + HELD_TICKS:
                return False
            self.free_rows = [row, *other_rows]
        return True

    def _start_new(self, plan: Schedule, entry: ScheduledRequest) -> bool:
        """Start a request that has nothing in host memory, with the longest cached prefix."""
        request = entry.request
        longest = self._longest_prefix(request)
        state = self.cache.state
        lacks_slots = state is not None and state.pool.available < 2
        if not super()._start(plan, entry):
            return False
        self._started.append(request.id)
        cached = entry.max_committed
        # A snapshot is not kept where the row itself would get no slot.
        if cached != longest and not (lacks_slots and cached == 0):
            raise InvariantError(
                f"request {request.id} has {cached} cached tokens, and {longest} could be resumed"
            )
        prefix = request.prompt_token_ids[:cached]
        if cached and not any(_has_prefix(known, request, prefix) for known in self._begun):
            raise InvariantError(
                f"request {request.id} has {cached} cached tokens that no request of its salt and "
                "adapter had"
            )
        self._begun.append(request)
        return True

    def _longest_prefix(self, request: Request) -> int:
        """Return the maximum prompt tokens that the cache lets a request resume."""
        cache = self.cache
        if not cache.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return 0
        size = cache.config.page_size
        prompt = request.prompt_token_ids
        fresh = CacheSeq(prompt, root=self.cache_root(request))
        keys = [fresh.key(page, size) for page in range((len(prompt) - 1) // size)]
        cached = [key in cache.paged.pool.by_key or (PAGES, key) in cache.host.entries
                  for key in keys]  # fmt: skip
        num_pages = (*cached, False).index(False)
        if cache.state is not None:
            known = cache.state.pool.by_key
            while num_pages and not (
                keys[num_pages - 1] in known or (SLOTS, keys[num_pages - 1]) in cache.host.entries
            ):
                num_pages -= 1
        return num_pages * size


def _has_prefix(known: Request, request: Request, prefix: list[int]) -> bool:
    """Return whether a request may have cached a prefix that another request resumes."""
    if (known.cache_salt, known.adapter) != (request.cache_salt, request.adapter):
        return False
    return [*known.prompt_token_ids, *known.output_token_ids][: len(prefix)] == prefix


def raise_if(fault: str | None) -> None:
    """Raise InvariantError with this text, if there is one."""
    if fault is not None:
        raise InvariantError(fault)


def check_snapshots(schedule: Schedule, slots: set[int]) -> None:
    """Raise InvariantError if a snapshot of a step conflicts with another row.

    Rows of a step run in no order. So each snapshot has one writer and no reader in the same step,
    and no running row uses it as its own slot.
    """
    written = [chunk.snapshot_slot for chunk in schedule.prompt if chunk.snapshot_slot]
    read = {chunk.state_src for chunk in schedule.prompt} - {0}
    if len(set(written)) < len(written) or read & set(written):
        raise InvariantError("a snapshot is written twice in a step, or read where it is written")
    if slots & (read | set(written)):
        raise InvariantError("a snapshot of a step is a row's own slot")


def check_no_prefixes(cache: Cache) -> None:
    """Raise InvariantError if prefixes are cached, which a failed step may have written in part."""
    kept = sum(len(group.pool.by_key) for group in cache.groups) + len(cache.host.entries)
    if kept:
        raise InvariantError(f"{kept} cached pages and snapshots outlive a failed step")


def check_no_leaks(engine: Engine) -> None:
    """Raise InvariantError if resources are still in use although all requests have finished."""
    scheduler = engine.scheduler
    table = worker_of(engine).table
    null_values = (
        table.computed[0],
        table.folded[0],
        table.page_table[0].sum(),
        table.state_slots[0],
    )
    if any(int(value) for value in null_values):
        raise InvariantError("the null row was written to")
    cache = scheduler.cache
    state = cache.state
    for resource, num_remaining in (
        ("rows", scheduler.max_num_seqs - len(scheduler.free_rows)),
        ("requests", len(scheduler.entries) + len(scheduler.queue) + len(scheduler.running)),
        ("requests to preempt", len(scheduler.preempt_next)),
        ("requests with pages", len(cache.seqs)),
        ("pages in use", cache.paged.pool.used),
        ("slots in use", state.pool.used if state else 0),
        ("pinned snapshots", len(state.pins) if state else 0),
        ("rows in host memory", len(worker_of(engine).saved)),
        ("pinned places in host memory", len(cache.host.pinned)),
        ("counts of requests", len(engine._counted)),
    ):
        if num_remaining:
            raise InvariantError(
                f"{num_remaining} {resource} remain after all requests have finished"
            )
