"""The cache's operations: joint hits, pins, eviction order, exclusive writers."""

from collections import Counter

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import CacheSeq
from lockstep.cache.pool import Pool
from lockstep.errors import ConfigError

PAGE = 4


def make(pages: int = 20, slots: int = 0, rows: int = 2, caching: bool = True) -> Cache:
    return Cache(CacheConfig(pages, PAGE, slots, rows, caching))


def run_prompt(cache: Cache, tokens: list[int], snapshots: tuple[int, ...] = ()) -> CacheSeq:
    """Admit, compute and commit a complete prompt, with snapshots at these lengths."""
    seq = CacheSeq(tokens)
    assert cache.admit(seq, len(tokens)) is not None
    for point in snapshots:
        assert cache.snapshot(seq, point) > 0
    cache.commit(seq, len(tokens))
    cache.end_schedule()
    cache.check()
    return seq


def cached(cache: Cache, tokens: list[int]) -> int | None:
    seq = CacheSeq(tokens)
    result = cache.admit(seq, len(tokens))
    cache.end_schedule()
    cache.check()
    cache.release(seq)
    return result


def test_hits_are_full_pages_and_leave_one_token() -> None:
    cache = make()
    prompt = list(range(12))
    assert cached(cache, prompt) == 0
    run_prompt(cache, prompt)
    assert cached(cache, prompt) == 8
    assert cached(cache, [*prompt, 1]) == 12
    assert cached(cache, prompt[:11]) == 8
    assert cached(cache, [*prompt[:7], 99, *prompt[8:], 1]) == 4
    assert cached(cache, [99, *prompt[1:]]) == 0
    assert cache.hit_tokens == 32 and cache.query_tokens == 12 + 12 + 12 + 13 + 11 + 13 + 12


def test_joint_hit_needs_pages_and_snapshot() -> None:
    cache = make(slots=9)
    prompt = list(range(16))
    run_prompt(cache, prompt, snapshots=(4, 12))
    assert cached(cache, [*prompt, 1]) == 12
    assert cached(cache, prompt[:12]) == 4
    assert cached(cache, prompt[:4]) == 0
    assert cached(cache, prompt[:5]) == 4


def test_hit_resumes_from_its_snapshot_where_more_pages_are_cached() -> None:
    cache = make(slots=9)
    prompt = list(range(16))
    run_prompt(cache, prompt, snapshots=(4,))
    seq = CacheSeq([*prompt, 1])
    assert cache.admit(seq, 17) == 4
    assert seq.branch == 16
    assert cache.state is not None
    assert cache.state.pool.key_of[seq.source] == seq.keys[0]


def test_snapshot_without_its_pages_is_no_hit() -> None:
    cache = make(pages=5, slots=9)
    prompt = list(range(16))
    cache.release(run_prompt(cache, prompt, snapshots=(4, 16)))
    other = CacheSeq([77, 78, 79])
    assert cache.admit(other, 4) == 0
    assert cached(cache, [*prompt[:12], 5]) is None
    assert cached(cache, prompt[:5]) == 4


def test_generated_pages_are_cached_only_without_state() -> None:
    for slots, expected in ((0, 8), (9, 4)):
        cache = make(slots=slots)
        output = [50, 51]
        seq = CacheSeq(list(range(6)), output)
        cache.admit(seq, 8)
        if slots:
            cache.snapshot(seq, 4)
            cache.snapshot(CacheSeq([*range(6), *output]), 8)
        cache.commit(seq, 8)
        cache.end_schedule()
        cache.check()
        assert cached(cache, [*range(6), *output, 1]) == expected


def test_snapshot_is_pinned_before_allocation() -> None:
    cache = make(slots=4)
    prompt = list(range(8))
    cache.release(run_prompt(cache, prompt, snapshots=(4,)))
    seq = CacheSeq([*range(4), 9])
    assert cache.admit(seq, 8) == 4
    assert seq.source and seq.source != seq.slot
    other = CacheSeq([70, 71, 72, 73, 74])
    assert cache.admit(other, 8) == 0
    assert other.slot not in (seq.source, 0)
    assert cache.snapshot(other, 4) == 0, "the pinned snapshot was given to a writer"
    cache.check()
    cache.end_schedule()
    assert cache.snapshot(other, 4) == seq.source
    cache.end_schedule()
    cache.check()


def test_row_slot_has_priority_over_a_snapshot() -> None:
    cache = make(slots=2, rows=1)
    prompt = list(range(8))
    seq = run_prompt(cache, prompt)
    cache.release(seq)
    assert cache.snapshot(seq, 4) == 1
    cache.end_schedule()
    assert cached(cache, prompt) == 0


def test_cached_snapshot_is_not_repeated() -> None:
    cache = make(slots=9)
    prompt = list(range(8))
    seq = run_prompt(cache, prompt, snapshots=(4,))
    assert cache.snapshot(seq, 4) == 0


def test_eviction_is_lru_from_the_tail() -> None:
    cache = make(pages=7)
    first = [1] * 12
    second = [2] * 12
    cache.release(run_prompt(cache, first))
    cache.release(run_prompt(cache, second))
    assert cached(cache, [*first, 0, 0]) is not None
    taken = CacheSeq([3] * 8)
    assert cache.admit(taken, 8) == 0
    cache.check()
    assert cache.paged.hit(CacheSeq(second), 3) < 3
    assert cache.paged.hit(CacheSeq(first), 3) >= 2


def test_refused_admission_changes_nothing() -> None:
    cache = make(pages=5, slots=6)
    prompt = list(range(8))
    holder = run_prompt(cache, prompt, snapshots=(4,))
    seq = CacheSeq([*range(4), *[9] * 12])
    assert cache.admit(seq, 17) is None
    assert not seq.pages and not seq.slot and not seq.source
    cache.check()
    assert cache.admit(CacheSeq([*range(4), 9]), 8, spare=2) is None
    assert not cache.reserve(holder, 17)
    assert cache.reserve(holder, 16) and len(holder.pages) == 4
    cache.check()


def test_disabled_caching_and_opt_out_have_no_hits() -> None:
    cache = make(caching=False)
    run_prompt(cache, [1] * 8)
    assert cached(cache, [1] * 9) == 0 and cache.query_tokens == 0
    cache = make()
    run_prompt(cache, [1] * 8)
    assert cache.admit(CacheSeq([1] * 9, reuse=False), 9) == 0
    assert cache.admit(CacheSeq([1] * 9, root=b"other"), 9) == 0


def test_reset_empties_the_cache_and_keeps_owned_pages() -> None:
    cache = make(slots=6)
    prompt = list(range(9))
    cache.release(run_prompt(cache, prompt, snapshots=(4, 8)))
    running = run_prompt(cache, [7] * 9, snapshots=(4,))
    assert cached(cache, prompt) == 8
    cache.drop_cached()
    cache.check()
    assert cached(cache, prompt) == cached(cache, [7] * 9) == 0
    assert cache.reserve(running, 13)
    cache.release(running)
    cache.check()
    assert cache.paged.pool.available == cache.paged.pool.total


def test_pool_excludes_the_null_id_and_detects_leaks() -> None:
    pool = Pool(3)
    assert sorted([pool.take(), pool.take()]) == [1, 2] and pool.take() == 0
    with pytest.raises(AssertionError):
        pool.check(Counter([1]))


def test_invalid_cache_config_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_pages=1"):
        CacheConfig(1)
    with pytest.raises(ConfigError, match="num_state_slots=3"):
        CacheConfig(9, num_state_slots=3, max_num_seqs=4)


def test_digests_change_keys_of_their_page_and_later_pages() -> None:
    """Placeholder tokens are equal, so the digest of their content determines which pages two
    prompts share."""
    tokens = list(range(4 * PAGE))
    plain = CacheSeq(tokens)
    image = CacheSeq(tokens, digests={PAGE + 1: b"first image"})
    other = CacheSeq(tokens, digests={PAGE + 1: b"second image"})
    moved = CacheSeq(tokens, digests={PAGE + 2: b"first image"})
    keys = [[seq.key(page, PAGE) for page in range(4)] for seq in (plain, image, other, moved)]
    assert len({tuple(line[:1]) for line in keys}) == 1, "nothing differs before the image"
    for page in (1, 2, 3):
        assert len({line[page] for line in keys}) == 4


def test_keys_of_many_pages_differ() -> None:
    """A server has pages for weeks, so keys must not repeat."""
    seq = CacheSeq(range(2000 * PAGE))
    seq.key(1999, PAGE)
    assert len(set(seq.keys)) == 2000
