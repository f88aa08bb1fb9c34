"""Cache in four verbs, in tokens: admit, reserve, commit, release.

The device runs schedules in order, so a schedule may share pages that an earlier, launched one
still writes. Within one schedule no page or slot that it reads or writes may change owners:
snapshots and host pages stay pinned until end_schedule(). That call returns the schedule's copies:
those to the host run before its steps write, those to the device before its prompt step reads.
"""

from dataclasses import dataclass

from lockstep.cache.block_log import BlockLog
from lockstep.cache.groups import CacheSeq, PagedGroup, StateGroup
from lockstep.cache.host_tier import DEVICE, HOST, PAGES, SLOTS, HostPool, Key, Moves
from lockstep.errors import ConfigError


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of a cache.

    num_pages, num_state_slots: the null page and the null slot included; num_state_slots 0: no
    recurrent state. page_size: tokens per page. snapshot_every: pages of a prompt between two
    snapshots of its state; a prompt's last whole page gets a snapshot too, and so does the last of
    the cached pages that lack one. host_pages: size of the host tier; 0 drops evicted pages.
    slot_host_pages: host pages per snapshot.

    Raises ConfigError for too few pages or slots.
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
        min_slots = self.max_num_seqs + 1
        if self.num_pages < 2:
            raise ConfigError(
                f"num_pages={self.num_pages} is not allowed; allowed: 2 or more (page 0 is the "
                "null page). Give the cache more memory."
            )
        if self.num_state_slots and self.num_state_slots < min_slots:
            raise ConfigError(
                f"num_state_slots={self.num_state_slots} is not allowed; allowed: 0 (no recurrent "
                f"state) or at least {min_slots} (max_num_seqs and the null slot). Lower "
                "max_num_seqs."
            )


class Cache:
    """Bookkeeping of pages and slots: their owners, their cached content and their pins.

    query_tokens: prompt tokens of admitted sequences that may reuse prefixes. hit_tokens: those of
    them that were cached. block_log: None until log_blocks().
    """

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
        self.block_log: BlockLog | None = None

    def log_blocks(self) -> BlockLog:
        """Log what is cached from now on, while nothing is cached yet; return the log."""
        log = BlockLog(self.config.page_size, self.state is not None)
        self.block_log = log
        self.host.observer = log
        for group in self.groups:
            group.pool.observer = log
        return log

    @property
    def host_hit_tokens(self) -> int:
        """Return the number of hit_tokens whose pages came back from host memory."""
        return self.paged.pool.host.num_fetched * self.config.page_size

    @property
    def host_query_tokens(self) -> int:
        """Return the number of query_tokens that no device page had, so that the host tier was
        searched.
        """
        looked_up = self.query_tokens - self.hit_tokens + self.host_hit_tokens
        return looked_up if self.host.size else 0

    @property
    def capacity(self) -> int:
        """Return the maximum tokens of one sequence that has all pages."""
        return self.paged.pool.total * self.config.page_size

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens occupy."""
        return -(-tokens // self.config.page_size)

    def admit(self, seq: CacheSeq, tokens: int, spare: int = 0) -> int | None:
        """Give a sequence a slot and pages for `tokens` tokens; return how many tokens are cached.

        The hit is the longest prefix that every group can resume, and leaves one token to compute.
        Returns None, and changes nothing, if memory does not suffice with `spare` pages left over.
        """
        hit = self._hit(seq)
        # Idle pages of the hit count as available, but will not be once they are shared.
        missing = self.pages_for(tokens) - hit + self.paged.pool.cost(self.paged.keys(seq, hit))
        lacks_slot = self.state is not None and not self.state.pool.available
        if lacks_slot or missing + spare > self.paged.pool.available:
            return None
        # Pin first: taking fresh pages below may evict what the hit needs.
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
        """Return the pages of the longest prefix that both groups can resume; sets seq.branch.

        Returns 0 if keeping the snapshot would leave no slot for the row itself.
        """
        if not (self.config.enable_prefix_caching and seq.reuse):
            return 0
        # The last prompt token is always computed: its logits give the first answer token.
        hit = self.paged.hit(seq, (len(seq.prompt) - 1) // self.config.page_size)
        if self.state is None:
            return hit
        resumed = self.state.hit(seq, hit)
        seq.branch = hit * self.config.page_size if resumed < hit else 0
        # Pinning the snapshot must leave a slot for the row itself.
        num_slots = self.state.pool.cost(self.state.keys(seq, resumed))
        return resumed if num_slots < self.state.pool.available else 0

    def readmit(self, seq: CacheSeq, tokens: int, spare: int = 0) -> bool:
        """Give fresh pages and a fresh slot to a sequence that comes back from host memory.

        Returns False, and changes nothing, if memory does not suffice with `spare` pages left over.
        """
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
        """Grow a sequence to cover `tokens` tokens; return False, and change nothing, if pages are
        short.
        """
        return self.paged.reserve(seq, tokens)

    def prompt_end(self, seq: CacheSeq, start: int) -> int:
        """Return the maximum end of a chunk that begins at `start`.

        That is the prompt's end, or the end of cached pages whose state needs a snapshot.
        """
        return seq.branch if start < seq.branch else len(seq.prompt)

    def wants_snapshot(self, seq: CacheSeq, start: int, tokens: int) -> bool:
        """Return whether a chunk from `start` should keep the state after `tokens` tokens.

        It should where it crosses a multiple of snapshot_every pages, ends the prompt's whole
        pages, or ends the pages that are cached without a snapshot.
        """
        size = self.config.page_size
        span = size * self.config.snapshot_every
        passes = tokens // span > start // span
        ends = (len(seq.prompt) // size * size, seq.branch)
        return seq.publish and tokens > start and (passes or tokens in ends)

    def snapshot(self, seq: CacheSeq, tokens: int) -> int:
        """Return a slot for the state after `tokens` prompt tokens (whole pages); 0 for none."""
        if self.state is None or not self.config.enable_prefix_caching:
            return 0
        return self.state.snapshot(seq, tokens)

    def commit(self, seq: CacheSeq, tokens: int) -> None:
        """Mark the first `tokens` tokens as final: their full pages may be shared from now on.

        With recurrent state only prompt pages are shared, since only states of the chunked form can
        be resumed.
        """
        if self.config.enable_prefix_caching and seq.publish:
            self.paged.commit(seq, min(tokens, len(seq.prompt)) if self.state else tokens)

    def end_schedule(self) -> tuple[Moves, Moves]:
        """End a schedule and unpin everything; return its copies to the host and to the device."""
        self.host.end_schedule()
        if self.state:
            self.state.end_schedule()
        evicted: Moves = {}
        fetched: Moves = {}
        for group in self.groups:
            group.pool.host.end_schedule(evicted, fetched)
        return evicted, fetched

    def release(self, seq: CacheSeq) -> None:
        """Release everything that a sequence owns; cached content stays until it is evicted."""
        self.paged.release(seq)
        if self.state:
            self.state.release(seq)
        self.seqs.discard(seq)

    def drop_cached(self) -> None:
        """Drop all cached content; what sequences own stays theirs."""
        self.end_schedule()
        self.host.drop_cached()
        for group in self.groups:
            group.pool.drop_cached()
        if self.block_log is not None:
            self.block_log.clear()

    def check(self) -> None:
        """Assert the invariants: every id has one state, references equal owners, pins are
        balanced.
        """
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
        if self.block_log is not None:
            self.block_log.check(self._cached(PAGES), self._cached(SLOTS))

    def _cached(self, pool: str) -> dict[str, set[Key]]:
        """Return the keys that each medium has of a pool."""
        on_device = {key for g in self.groups if g.pool.host.name == pool for key in g.pool.by_key}
        on_host = {key for name, key in self.host.entries if name == pool}
        return {DEVICE: on_device, HOST: on_host}
