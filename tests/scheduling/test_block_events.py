"""Block events under random walks: an independent index predicts every request's cached tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lockstep.cache.block_log import BlockEvent, BlocksCleared
from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import CacheSeq
from lockstep.engine.kv_publisher import BlockFormat, encode_event
from lockstep.scheduling.schedule import Schedule
from lockstep.scheduling.scheduler import Scheduler
from tests.kv_index import PrefixIndex
from tests.scheduling.test_scheduler_walk import ADAPTERS, PAGE, walk

FACTS = BlockFormat(PAGE, {name: i for i, name in enumerate(ADAPTERS, 1)})


def payload(events: Sequence[BlockEvent], form: str) -> bytes:
    """Return a batch on the wire. form: map or array."""
    encoded: list[Any] = [encode_event(event, FACTS) for event in events]
    if form == "array":
        encoded = [list(fields.values()) for fields in encoded]
    return msgspec.msgpack.encode([1.5, encoded, 0])


class Predictions:
    """Predictions of an index that sees a scheduler's events only.

    exact, no_slot: admissions that were predicted, and those that found a snapshot but no slot for
    the row next to it. cached: cached tokens of all. over: tokens by which a gateway that knows
    pages only overestimates.
    """

    def __init__(self, form: str, snapshot_every: int) -> None:
        self.snapshot_every = snapshot_every
        self.index = PrefixIndex()
        self.form = form
        self.exact = self.no_slot = self.cached = self.over = 0

    def watch(self, sched: Scheduler) -> None:
        """Predict the cached tokens of each admission from the events before it."""
        cache = sched.cache
        cache.config = replace(cache.config, snapshot_every=self.snapshot_every)
        log = cache.log_blocks()
        admit, schedule = cache.admit, sched.schedule

        def predicted_admit(seq: CacheSeq, tokens: int, spare: int = 0) -> int | None:
            if events := log.drain():
                self.index.apply(payload(events, self.form))
                self.index.check()
            key = (seq.prompt, seq.cache_salt, seq.adapter)
            expected = self.index.match(*key) if seq.reuse else 0
            lacks_slot = False
            if cache.state and expected:
                keys = cache.state.keys(seq, expected // PAGE)
                lacks_slot = cache.state.pool.cost(keys) >= cache.state.pool.available
            cached = admit(seq, tokens, spare)
            if cached is not None:
                assert cached == (0 if lacks_slot else expected)
                self.exact += not lacks_slot
                self.no_slot += lacks_slot
                self.cached += cached
                self.over += self.index.attention_match(*key) - expected if seq.reuse else 0
            return cached

        def schedule_after_reset() -> Schedule:
            if sched.ticks % 100 == 99:
                cache.drop_cached()
            return schedule()

        cache.admit = predicted_admit  # type: ignore[method-assign]
        sched.schedule = schedule_after_reset  # type: ignore[method-assign]


def test_a_reset_hides_what_a_running_row_adds_until_its_prefix_is_back() -> None:
    """A subscriber that was told to forget the prefix does not know the parent of a later page."""
    cache = Cache(CacheConfig(num_pages=20, page_size=PAGE))
    log = cache.log_blocks()
    index = PrefixIndex()
    tokens = list(range(3 * PAGE + 1))
    row, other = CacheSeq(tokens), CacheSeq(tokens[: PAGE + 1])
    cache.admit(row, len(tokens))
    cache.commit(row, PAGE)
    cache.drop_cached()
    cache.commit(row, 3 * PAGE)
    assert log.drain() == [BlocksCleared()]
    cache.admit(other, len(other.prompt))
    cache.commit(other, PAGE)
    index.apply(payload(log.drain(), "map"))
    assert index.match(tokens) == 3 * PAGE
    cache.check()


def test_a_page_goes_with_its_evicted_parent() -> None:
    """Two rows compute one prefix. The row whose copy is cached ends, and its page is evicted."""
    cache = Cache(CacheConfig(num_pages=5, page_size=PAGE))
    log = cache.log_blocks()
    index = PrefixIndex()
    tokens = list(range(2 * PAGE + 1))
    first, second = CacheSeq(tokens[: PAGE + 1]), CacheSeq(tokens)
    for seq in (first, second):
        cache.admit(seq, PAGE)
    for seq in (first, second):
        cache.commit(seq, PAGE)
    cache.reserve(second, 2 * PAGE)
    cache.commit(second, 2 * PAGE)
    index.apply(payload(log.drain(), "map"))
    assert index.match(tokens) == 2 * PAGE
    cache.release(first)
    cache.reserve(second, 4 * PAGE)
    index.apply(payload(log.drain(), "map"))
    index.check()
    assert index.match(tokens) == 0
    cache.check()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_index_predicts_cached_tokens_in_walks(state: bool, form: str, steps_ahead: int) -> None:
    """Walks evict, preempt, abort, reset, use salts and adapters, and offload to host memory."""
    predictions = []
    scheds = []
    for seed in range(8):
        one = Predictions(form, snapshot_every=1 + seed % 3)
        number = 1000 * steps_ahead + 100 * state + seed
        scheds.append(walk(number, 210, state, 4, "fcfs", steps_ahead, one.watch))
        predictions.append(one)
    assert sum(one.exact for one in predictions) > 200
    assert sum(one.cached for one in predictions) > 200
    assert sum(s.preemptions for s in scheds) > 0
    assert sum(s.cache.host_hit_tokens for s in scheds) > 0
    assert set().union(*(one.index.media for one in predictions)) == {"GPU", "CPU"}
    overestimates = sum(one.over for one in predictions)
    assert overestimates == 0 if not state else overestimates > 0
