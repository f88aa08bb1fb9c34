"""The cache in four verbs, in tokens: admit, reserve, commit, release.

All device work is ordered, so what a launched schedule writes may be shared by the next one. Inside
one schedule nothing that it reads or writes may change hands: snapshots and places in host memory
stay pinned until settle(), which says what moves to the host before the schedule's steps write, and
what comes back before its prompt step reads.
"""

from dataclasses import dataclass

from lockstep.cache.groups import CacheSeq, PagedGroup, StateGroup
from lockstep.cache.host_tier import HostPool, Moves
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class CacheConfig:
    """num_pages and num_state_slots count the null one; num_state_slots 0: no recurrent state.

    snapshot_every: pages of a prompt between two snapshots of its state; its last page that is
    whole has one besides, and the last one that was cached without a snapshot. host_pages: of host
    memory, for what is evicted; 0: it is dropped. slot_host_pages: host pages that a snapshot
    takes.
    """

    num_pages: int
    page_size: int = 64
    num_state_slots: int = 0
    max_num_seqs: int = 16
    enable_prefix_caching: bool = True
    snapshot_every: int = 1
    host_pages: int = 0
    slot_host_pages: int = 1

    def __post_init__(self) -> None:
        least = self.max_num_seqs + 1
        if self.num_pages < 2:
            raise ConfigError(
                f"num_pages={self.num_pages} is not allowed; allowed: 2 or more (page 0 is the "
                "null page). Give the cache more memory."
            )
        if self.num_state_slots and self.num_state_slots < least:
            raise ConfigError(
                f"num_state_slots={self.num_state_slots} is not allowed; allowed: 0 (no recurrent "
                f"state) or at least {least} (max_num_seqs and the null slot). Lower max_num_seqs."
            )


class Cache:
    """Who owns which page and slot. `hit_tokens` of `query_tokens` prompt tokens were cached."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.host = HostPool(config.host_pages)
        self.paged = PagedGroup(config.num_pages, config.page_size, self.host)
        self.state: StateGroup | None = None
        if config.num_state_slots:
            sizes = config.num_state_slots, config.page_size
            self.state = StateGroup(*sizes, self.host, config.slot_host_pages)
        self.groups = [group for group in (self.paged, self.state) if group]
        self.seqs: set[CacheSeq] = set()
        self.hit_tokens = 0
        self.query_tokens = 0

    @property
    def host_hit_tokens(self) -> int:
        """Those of hit_tokens whose pages came back from host memory."""
        return self.paged.pool.host.num_back * self.config.page_size

    @property
    def host_query_tokens(self) -> int:
        """Those of query_tokens that were looked up in host memory: no page here had them."""
        looked_up = self.query_tokens - self.hit_tokens + self.host_hit_tokens
        return looked_up if self.host.size else 0

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have if it is alone."""
        return self.paged.pool.total * self.config.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill or begin."""
        return -(-tokens // self.config.page_size)

    def admit(self, seq: CacheSeq, tokens: int, spare: int = 0) -> int | None:
        """Gives a sequence a slot and pages for `tokens`; returns how many tokens are cached.

        The hit is the longest that every group can resume, and leaves a token to compute. None, and
        nothing changed, if memory does not suffice with `spare` pages left over.
        """
        hit = self._hit(seq)
        missing = self.pages_for(tokens) - hit + self.paged.pool.cost(self.paged.keys(seq, hit))
        lacks_slot = self.state is not None and not self.state.pool.available
        if lacks_slot or missing + spare > self.paged.pool.available:
            return None
        for group in self.groups:
            group.pool.pin(group.keys(seq, hit))
        for group in self.groups:
            group.resume(seq, hit)
        self.paged.reserve(seq, tokens)
        self.seqs.add(seq)
        cached = hit * self.config.page_size
        if self.config.enable_prefix_caching and seq.reuse:
            self.hit_tokens += cached
            self.query_tokens += len(seq.prompt)
        return cached

    def _hit(self, seq: CacheSeq) -> int:
        """The joint prefix hit, in pages. A row comes before the snapshot that it could resume."""
        if not (self.config.enable_prefix_caching and seq.reuse):
            return 0
        hit = self.paged.hit(seq, (len(seq.prompt) - 1) // self.config.page_size)
        if self.state is None:
            return hit
        resumed = self.state.hit(seq, hit)
        seq.branch = hit * self.config.page_size if resumed < hit else 0
        taken = self.state.pool.cost(self.state.keys(seq, resumed))
        return resumed if taken < self.state.pool.available else 0

    def readmit(self, seq: CacheSeq, tokens: int, spare: int = 0) -> bool:
        """Fresh pages and a fresh slot for a sequence that comes back from the host."""
        if self.pages_for(tokens) + spare > self.paged.pool.available:
            return False
        if self.state:
            seq.slot = self.state.pool.take()
            if not seq.slot:
                return False
        self.paged.reserve(seq, tokens)
        self.seqs.add(seq)
        return True

    def reserve(self, seq: CacheSeq, tokens: int) -> bool:
        """Pages to cover `tokens` tokens in all; False, and nothing changed, if there are none."""
        return self.paged.reserve(seq, tokens)

    def prompt_end(self, seq: CacheSeq, start: int) -> int:
        """Where a chunk that begins at `start` ends at the latest: the prompt's end, or where
        cached pages end whose state is to be kept."""
        return seq.branch if start < seq.branch else len(seq.prompt)

    def wants_snapshot(self, seq: CacheSeq, start: int, tokens: int) -> bool:
        """Whether the state after `tokens` (whole pages) of a prompt's tokens is to be kept, by a
        chunk that begins at `start`: it passes a multiple of snapshot_every pages, or is the last
        of whole pages, or of those that were cached without it."""
        size = self.config.page_size
        span = size * self.config.snapshot_every
        passes = tokens // span > start // span
        ends = (len(seq.prompt) // size * size, seq.branch)
        return tokens > start and (passes or tokens in ends)

    def snapshot(self, seq: CacheSeq, tokens: int) -> int:
        """A slot for the state after `tokens` (whole pages) prompt tokens, or 0 for none."""
        if self.state is None or not self.config.enable_prefix_caching:
            return 0
        return self.state.snapshot(seq, tokens)

    def commit(self, seq: CacheSeq, tokens: int) -> None:
        """The first `tokens` tokens are final: their full pages may be shared from now on.

        With recurrent state only prompt pages are, since only prompt-law state can resume there.
        """
        if self.config.enable_prefix_caching:
            self.paged.commit(seq, min(tokens, len(seq.prompt)) if self.state else tokens)

    def settle(self) -> tuple[Moves, Moves]:
        """Ends a schedule: nothing is pinned for it any more. -> what it moves to the host, and
        back, by the names of pools that move anything."""
        self.host.settle()
        if self.state:
            self.state.settle()
        out: Moves = {}
        back: Moves = {}
        for group in self.groups:
            group.pool.host.settle(out, back)
        return out, back

    def release(self, seq: CacheSeq) -> None:
        """Gives back all that a sequence has; what is cached of it stays until evicted."""
        self.paged.release(seq)
        if self.state:
            self.state.release(seq)
        self.seqs.discard(seq)

    def forget(self) -> None:
        """Drops everything that is cached for reuse; what sequences own stays theirs."""
        self.settle()
        self.host.forget()
        for group in self.groups:
            group.pool.forget()

    def check(self) -> None:
        """Asserts the invariants: one place per id, references equal owners, pins balanced."""
        self.host.check()
        self.paged.pool.check(self.paged.owners(self.seqs))
        for seq in self.seqs:
            for index, page in enumerate(seq.pages):
                shared = self.paged.pool.refs[page] > 1
                cached = page in self.paged.pool.key_of
                assert index < seq.published or not (shared or cached), "a writer shares a page"
        if self.state:
            self.state.pool.check(self.state.owners(self.seqs))
            for seq in self.seqs:
                assert self.state.pool.refs[seq.slot] == 1, "a row's slot is shared"
                assert seq.slot not in self.state.pool.key_of, "a row's slot is a snapshot"
