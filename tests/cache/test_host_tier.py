"""The host tier of the cache: evicted entries are found again, within its capacity."""

import random
from collections import OrderedDict

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import CacheSeq, root_key
from lockstep.cache.host_tier import PAGES, SLOTS, HostPool, Moves

PAGE = 4


def make(pages: int, host: int, slots: int = 0, rows: int = 2) -> Cache:
    """Return a cache. host: pages of host memory; a snapshot needs two."""
    sizes = {"host_pages": host, "slot_host_pages": 2}
    return Cache(CacheConfig(pages + 1, PAGE, slots, rows, **sizes))


def run_prompt(cache: Cache, tokens: list[int], salt: str = "") -> tuple[int, Moves, Moves]:
    """Compute a prompt, with a snapshot after its last full page, and release it.

    Returns: number of cached tokens, moves to the host, and back.
    """
    seq = CacheSeq(tokens, root=root_key(salt))
    cached = cache.admit(seq, len(tokens))
    assert cached is not None
    if cache.state:
        cache.snapshot(seq, len(tokens) // PAGE * PAGE)
    cache.commit(seq, len(tokens))
    out, back = cache.end_schedule()
    cache.check()
    cache.release(seq)
    cache.check()
    return cached, out, back


def test_evicted_pages_are_restored() -> None:
    cache = make(pages=3, host=9)
    first = [1] * 9
    assert run_prompt(cache, first)[0] == 0
    cached, out, back = run_prompt(cache, [2] * 9)
    assert cached == 0 and len(out[PAGES]) == 2 and not back
    kept = {move.host_pages for move in out[PAGES]}
    cached, out, back = run_prompt(cache, first)
    assert cached == 8 and cache.host_hit_tokens == 8 and cache.hit_tokens == 8
    assert {move.host_pages for move in back[PAGES]} == kept and len(out[PAGES]) == 2
    assert len({move.unit for move in back[PAGES]}) == 2


def test_pages_on_the_host_are_not_copied_again() -> None:
    cache = make(pages=3, host=9)
    for tokens in ([1] * 9, [2] * 9, [1] * 9):
        run_prompt(cache, tokens)
    assert run_prompt(cache, [2] * 9)[1] == {}
    assert cache.host.used == 4


def test_without_host_memory_evicted_pages_are_lost() -> None:
    cache = make(pages=3, host=0, slots=4)
    for tokens in ([1] * 9, [2] * 9, [1] * 9):
        assert run_prompt(cache, tokens) == (0, {}, {})


def test_one_host_page_keeps_the_last_evicted_page() -> None:
    """Tails are evicted first, so the start of the prompt remains."""
    cache = make(pages=3, host=1)
    run_prompt(cache, [1] * 9)
    run_prompt(cache, [2] * 9)
    assert cache.host.used == 1
    cached, _, back = run_prompt(cache, [1] * 9)
    assert cached == 4 and len(back[PAGES]) == 1


def test_host_page_is_written_once_per_schedule() -> None:
    """Pages and snapshots move separately, so two writes to one host page would have no order."""
    cache = make(pages=4, host=2, slots=4, rows=1)
    for number in (1, 2):
        run_prompt(cache, [number] * 5)
    group = cache.paged.pool
    state = cache.state
    assert state is not None
    while state.pool.available:
        state.pool.take()
    while group.available:
        group.take()
    cache.host.check()
    out, _ = cache.end_schedule()
    filled = [page for moves in out.values() for move in moves for page in move.host_pages]
    assert len(filled) == len(set(filled)) == 2


def test_snapshot_is_restored_with_its_pages() -> None:
    cache = make(pages=3, host=9, slots=4, rows=1)
    for number in (1, 2, 3):
        run_prompt(cache, [number] * 9)
    seq = CacheSeq([1] * 9)
    assert cache.admit(seq, 9) == 8
    _, back = cache.end_schedule()
    assert len(back[PAGES]) == 2
    (snapshot,) = back[SLOTS]
    assert snapshot.unit == seq.source != seq.slot
    assert len(snapshot.host_pages) == 2
    cache.check()


def test_restored_snapshot_needs_a_free_slot() -> None:
    cache = make(pages=3, host=9, slots=3, rows=1)
    for number in (1, 2, 3):
        run_prompt(cache, [number] * 9)
    holder = CacheSeq([], reuse=False)
    assert cache.readmit(holder, 0)
    cached, _, back = run_prompt(cache, [1] * 9)
    assert cached == 0 and not back


def test_restored_host_pages_are_not_evicted_by_their_hit() -> None:
    """With full host memory the restored pages evict three others, which find no space there."""
    cache = make(pages=3, host=2)
    run_prompt(cache, [1] * 9)
    run_prompt(cache, [2] * 12)
    cached, out, back = run_prompt(cache, [1] * 9)
    assert cached == 8 and len(back[PAGES]) == 2 and not out
    assert not cache.host.pinned


def test_refused_admission_moves_nothing() -> None:
    cache = make(pages=4, host=9, slots=4, rows=1)
    run_prompt(cache, [1] * 9)
    run_prompt(cache, [2] * 16)
    before = list(cache.host.entries)
    assert cache.admit(CacheSeq([1] * 9), 9, spare=2) is None
    assert cache.end_schedule() == ({}, {})
    assert list(cache.host.entries) == before
    cache.check()


def test_salts_isolate_host_memory() -> None:
    cache = make(pages=3, host=9)
    tokens = [1] * 9
    run_prompt(cache, tokens, "mine")
    run_prompt(cache, [2] * 9)
    for salt in ("", "yours"):
        assert run_prompt(cache, tokens, salt)[0] == 0
    assert run_prompt(cache, tokens, "mine")[0] == 8


def test_reset_empties_host_memory() -> None:
    cache = make(pages=3, host=9, slots=4, rows=1)
    for number in (1, 2, 3):
        run_prompt(cache, [number] * 9)
    assert cache.host.used
    cache.drop_cached()
    cache.check()
    assert not cache.host.used
    assert run_prompt(cache, [1] * 9)[0] == 0


def test_entry_larger_than_host_memory_is_refused() -> None:
    pool = HostPool(3)
    assert pool.store((PAGES, b"a"), 4) == ()
    host_pages = pool.store((PAGES, b"a"), 3)
    assert sorted(host_pages) == [0, 1, 2]
    pool.pin((PAGES, b"a"))
    assert pool.store((PAGES, b"b"), 1) == ()
    pool.end_schedule()
    assert len(pool.store((PAGES, b"b"), 1)) == 1
    assert not pool.touch((PAGES, b"a"))


class HostModel:
    """Reference of HostPool as a dict, least recently used entries first. Pinned entries stay.

    entries: (pool, key) -> host pages.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.entries: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self.pinned: set[tuple[str, bytes]] = set()

    def store(self, name: tuple[str, bytes], length: int) -> bool:
        """Store an entry if there is space; return whether there was."""
        if length > self.size - sum(self.entries[key] for key in self.pinned):
            return False
        while sum(self.entries.values()) + length > self.size:
            del self.entries[next(known for known in self.entries if known not in self.pinned)]
        self.entries[name] = length
        return True


@pytest.mark.parametrize("seed", range(8))
def test_random_walk_equals_the_reference_host_pool(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([0, 1, 5, 20])
    pool = HostPool(size)
    model = HostModel(size)
    for _ in range(600):
        name = (rng.choice([PAGES, SLOTS]), bytes([rng.randrange(12)]))
        length = 1 if name[0] == PAGES else 3
        action = rng.random()
        if action < 0.6:
            known = pool.touch(name)
            assert known == (name in model.entries)
            if known:
                model.entries.move_to_end(name)
            else:
                assert bool(pool.store(name, length)) == model.store(name, length)
        elif action < 0.8 and name in model.entries:
            pool.pin(name)
            model.entries.move_to_end(name)
            model.pinned.add(name)
        elif action < 0.9:
            pool.end_schedule()
            model.pinned.clear()
        assert list(pool.entries) == list(model.entries)
        assert pool.used == sum(model.entries.values())
        pool.check()
    pool.drop_cached()
    assert pool.used == 0 and sorted(pool.free) == list(range(size))
