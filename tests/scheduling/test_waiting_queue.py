"""The queue of waiting requests: order, removal, and constant cost."""

import sys
from dataclasses import dataclass
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult
from lockstep.scheduling.scheduler import Scheduler
from lockstep.scheduling.waiting_queue import MIN_STALE_KEYS, WaitingQueue


@dataclass(eq=False)
class Item:
    key: tuple[int, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9)), max_size=400)
)
def test_queue_equals_a_sorted_list(moves: list[tuple[str, int]]) -> None:
    queue: WaitingQueue[Item] = WaitingQueue()
    expected: list[Item] = []
    removed: list[Item] = []
    for number, (move, choice) in enumerate(moves):
        if move == "push":
            # Every third push brings back an entry that was removed, as preemption does.
            item = removed.pop() if removed and number % 3 == 0 else Item((choice, number))
            queue.push(item)
            expected.append(item)
        elif expected:
            expected.sort(key=lambda e: e.key)
            item = expected.pop(0 if move == "pop" else choice % len(expected))
            assert move == "remove" or queue.head() is item
            queue.remove(item)
            removed.append(item)
        expected.sort(key=lambda e: e.key)
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.head() is (expected[0] if expected else None)
        assert len(queue._heap) <= 2 * len(expected) + MIN_STALE_KEYS + 1


def test_order_survives_the_removal_of_most_entries() -> None:
    """Entries that were queued in the reverse of their order are removed, the last one first."""
    queue: WaitingQueue[Item] = WaitingQueue()
    items = [Item((-number, number)) for number in range(4 * MIN_STALE_KEYS)]
    for item in items:
        queue.push(item)
    for item in items[: 3 * MIN_STALE_KEYS]:
        queue.remove(item)
        assert queue.head() is items[-1]


def test_entry_is_queued_once() -> None:
    queue: WaitingQueue[Item] = WaitingQueue()
    item = Item((0, 1))
    queue.push(item)
    with pytest.raises(AssertionError, match="two entries"):
        queue.push(item)
    queue.remove(item)
    with pytest.raises(KeyError):
        queue.remove(item)


def calls_of_steps(policy: str, waiting: int) -> int:
    """Return the number of function calls of five steps while `waiting` requests wait for a row.

    Two of four rows were preempted before, because pages of 8 tokens run short.
    """
    cache = Cache(CacheConfig(num_pages=9, page_size=8, max_num_seqs=4))
    options = {"max_num_batched_tokens": 64, "max_model_len": 60, "query_len": 1}
    scheduler = Scheduler(cache, max_num_seqs=4, policy=policy, **options)  # type: ignore[arg-type]
    for index in range(4 + waiting):
        rank = 0 if index < 4 else index % 5 + 1
        scheduler.add(Request(f"r{index}", [index] * 7, SamplingParams(max_tokens=50), rank))

    def step() -> None:
        plan = scheduler.schedule()
        rows = [*plan.decode, *(chunk.row for chunk in plan.prompt if chunk.last)]
        scheduler.update(plan, Results({row: RowResult([5]) for row in rows}))

    for _ in range(12):
        step()
    assert scheduler.num_swapped and scheduler.num_waiting == waiting
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(5):
            step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_step_cost_is_independent_of_waiting_requests(policy: str) -> None:
    assert calls_of_steps(policy, 3) == calls_of_steps(policy, 2000)


def test_abort_of_all_waiting_requests_empties_the_queue() -> None:
    cache = Cache(CacheConfig(num_pages=9, page_size=8, max_num_seqs=2))
    scheduler = Scheduler(
        cache, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=60, query_len=1
    )
    for index in range(500):
        scheduler.add(Request(f"r{index}", [3] * 7, SamplingParams(max_tokens=4)))
    for index in reversed(range(500)):
        assert scheduler.abort(f"r{index}") is not None
    assert not scheduler.queue and scheduler.queue.head() is None and not scheduler.has_work()
    assert scheduler.num_waiting == scheduler.num_swapped == 0
