"""Rules that every schedule of a world is held to, whether or not a broken one reaches an answer.

They are the host's alone: nothing here waits for the device, which may be steps behind.
"""

from typing import Any

from lockstep.cache.cache import Cache
from lockstep.cache.groups import CacheSeq, salt_of
from lockstep.cache.host_tier import Key
from lockstep.engine.engine import Engine
from lockstep.scheduling.schedule import Admission, PromptChunk, Schedule
from lockstep.scheduling.scheduler import Scheduler
from lockstep.worker.executor import worker_of


class WorldError(Exception):
    """The engine broke a rule of its own while a world was played."""


class Rules:
    """Follows the schedules of one scheduler from its first one on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._pages: dict[int, list[int]] = {}
        self._cached: dict[str, dict[int, Key]] = {}
        self._host: dict[int, tuple[str, Key, int]] = {}

    def begin(self) -> None:
        """The next schedule is about to be made: what is cached now may leave by it."""
        for group in self.scheduler.cache.groups:
            self._cached[group.pool.host.name] = dict(group.pool.key_of)

    def hold(self, made: Schedule) -> None:
        """Raises WorldError where this schedule, made since begin(), breaks a rule."""
        self._place(made)
        for admission in made.admissions:
            self._admission(admission)
        self._evicted_and_fetched(made)
        for entry in self.scheduler.running:
            if self._pages.get(entry.row) != entry.seq.pages:
                raise WorldError(
                    f"row {entry.row} was told the pages {self._pages.get(entry.row)} and has "
                    f"{entry.seq.pages}"
                )
        state = self.scheduler.cache.state
        if state is None:
            return
        shares_no_snapshot(made, {entry.seq.slot for entry in self.scheduler.running})
        if state.pins:
            raise WorldError("snapshots are pinned behind the end of a schedule")
        for chunk in made.prompt:
            self._snapshots(chunk)

    def _place(self, made: Schedule) -> None:
        """What the runner is told of the rows' pages, in its order."""
        for swap in made.swap_out:
            if self._pages.pop(swap.row, [])[: len(swap.pages)] != swap.pages:
                raise WorldError(f"row {swap.row} is saved from pages that it has not")
        for swap in made.swap_in:
            self._pages[swap.row] = list(swap.pages)
        for admission in made.admissions:
            self._pages[admission.row] = list(admission.pages)
        rows = {entry.row for entry in self.scheduler.running}
        for grant in made.grants:
            if grant.row not in rows:
                raise WorldError(f"row {grant.row} is granted pages and does not run")
            self._pages[grant.row][grant.column :] = grant.pages

    def _admission(self, admission: Admission) -> None:
        """The pages that a request begins with are those of its own prompt and salt."""
        size = self.scheduler.cache.config.page_size
        known = self.scheduler.cache.paged.pool.key_of
        request = self.scheduler.entries[admission.spec.id].request
        fresh = CacheSeq(request.prompt_token_ids, salt=salt_of(request.cache_salt))
        for index, page in enumerate(admission.pages[: admission.start // size]):
            if known.get(page) != fresh.key(index, size):
                raise WorldError(
                    f"page {page} is not page {index} of what row {admission.row} asks"
                )

    def _evicted_and_fetched(self, made: Schedule) -> None:
        """What comes back under a key is what has left under it, every part of it."""
        for group in self.scheduler.cache.groups:
            name = group.pool.host.name
            left = self._cached.get(name, {})
            for move in made.evicted.get(name, ()):
                if move.unit not in left:
                    raise WorldError(f"{name}: {move.unit} was not cached when it was evicted")
                for index, page in enumerate(move.host_pages):
                    self._host[page] = (name, left[move.unit], index)
            known = group.pool.key_of
            for move in made.fetched.get(name, ()):
                found = [self._host.get(page) for page in move.host_pages]
                if found != [(name, known[move.unit], index) for index in range(len(found))]:
                    raise WorldError(f"{name}: {move.unit} is fetched from where another thing is")

    def _snapshots(self, chunk: PromptChunk) -> None:
        """A chunk reads the state at its start, and writes that at the last grid point within."""
        size = self.scheduler.cache.config.page_size
        end = chunk.start + chunk.length
        point = end // size * size
        for slot, tokens in ((chunk.state_src, chunk.start), (chunk.snapshot_slot, point)):
            if slot and not self._is_state(slot, chunk, tokens):
                raise WorldError(f"slot {slot} is not the snapshot behind {tokens} tokens")
        if chunk.snapshot_slot and point <= chunk.start:
            raise WorldError(f"a chunk from {chunk.start} to {end} writes a snapshot at {point}")

    def _is_state(self, slot: int, chunk: PromptChunk, tokens: int) -> bool:
        """Whether a slot is known as the state behind so many of the prompt's tokens."""
        cache = self.scheduler.cache
        request = next(e.request for e in self.scheduler.running if e.row == chunk.row)
        if cache.state is None or tokens < cache.config.page_size:
            return False
        fresh = CacheSeq(request.prompt_token_ids, salt=salt_of(request.cache_salt))
        size = cache.config.page_size
        return cache.state.pool.key_of.get(slot) == fresh.key(tokens // size - 1, size)


class RuledScheduler(Scheduler):
    """A scheduler whose every schedule is held to the rules."""

    def __init__(self, cache: Cache, **options: Any) -> None:
        super().__init__(cache, **options)
        self.rules = Rules(self)

    def schedule(self) -> Schedule:
        """The next schedule. Raises WorldError where it breaks a rule."""
        self.rules.begin()
        made = super().schedule()
        self.rules.hold(made)
        return made


def shares_no_snapshot(made: Schedule, slots: set[int]) -> None:
    """Raises WorldError where rows of one step write one snapshot, one reads what is written, or
    one of the running rows' own slots is a snapshot: rows run in no order."""
    written = [chunk.snapshot_slot for chunk in made.prompt if chunk.snapshot_slot]
    read = {chunk.state_src for chunk in made.prompt} - {0}
    if len(set(written)) < len(written) or read & set(written):
        raise WorldError("a snapshot is written twice in a step, or read where it is written")
    if slots & (read | set(written)):
        raise WorldError("a snapshot of a step is a row's own slot")


def leaves_nothing(engine: Engine) -> None:
    """Raises WorldError where all requests are over and something of one is not."""
    scheduler = engine.scheduler
    table = worker_of(engine).table
    null = (table.computed[0], table.folded[0], table.page_table[0].sum(), table.state_slots[0])
    if any(int(value) for value in null):
        raise WorldError("the null row was written to")
    cache = scheduler.cache
    state = cache.state
    for what, left in (
        ("rows", scheduler.max_num_seqs - len(scheduler.free_rows)),
        ("requests", len(scheduler.entries) + len(scheduler.queue) + len(scheduler.running)),
        ("requests to preempt", len(scheduler.forced)),
        ("requests with pages", len(cache.seqs)),
        ("pages in use", cache.paged.pool.used),
        ("slots in use", state.pool.used if state else 0),
        ("pinned snapshots", len(state.pins) if state else 0),
        ("rows in host memory", len(worker_of(engine).saved)),
        ("pinned places in host memory", len(cache.host.pinned)),
        ("counts of requests", len(engine._counted)),
    ):
        if left:
            raise WorldError(f"{left} {what} are left when all requests have ended")
