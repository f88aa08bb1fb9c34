"""Faults that change no answer: order of service, plans of steps, cached prefixes and metrics."""

from collections.abc import Sequence
from typing import Any

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import PagedGroup
from lockstep.check.scenarios import invariants
from lockstep.check.scenarios.accounting import Observed, wrong_metrics
from lockstep.check.scenarios.invariants import (
    CheckedScheduler,
    InvariantError,
    check_no_prefixes,
)
from lockstep.check.scenarios.service_order import ServiceOrder
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling import scheduler as scheduler_module
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Scheduler
from tests.scheduling import test_scheduler_walk as scheduler_walk

PROMPT = list(range(150))


def make(**options: Any) -> CheckedScheduler:
    cache = Cache(CacheConfig(num_pages=20, num_state_slots=0, max_num_seqs=2))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 128, "max_model_len": 400}
    return CheckedScheduler(cache, **{"query_len": 1, **sizes, **options})


def run(scheduler: CheckedScheduler) -> None:
    while scheduler.has_work():
        schedule = scheduler.schedule()
        rows = {chunk.row for chunk in schedule.prompt} | set(schedule.decode)
        scheduler.update(schedule, Results({row: RowResult([5]) for row in rows}))


def request(name: str, salt: str = "", **options: Any) -> Request:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return Request(name, PROMPT, params, cache_salt=salt, **options)


def test_order_of_service() -> None:
    order = ServiceOrder("priority")
    for name, priority in (("late", 3), ("first", 0), ("second", 0)):
        order.add(Request(name, [1], priority=priority))
    assert order.wrong_starts(["first", "second"], ["late"]) is None
    assert "against their keys" in str(order.wrong_starts(["second", "first"], []))
    assert "which come before it" in str(order.wrong_starts(["second"], ["first"]))
    assert order.wrong_victim("late", ["first", "late"]) is None
    assert "late comes later" in str(order.wrong_victim("first", ["first", "late"]))


def test_sound_scheduler_passes() -> None:
    scheduler = make()
    for name, salt in (("a", ""), ("b", "x"), ("c", "")):
        scheduler.add(request(name, salt))
        run(scheduler)
    assert [scheduler.resumptions[name].tokens for name in "abc"] == [0, 0, 128]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps_ahead", [0, 2])
def test_random_walks_raise_no_false_alarm(
    state: bool, policy: str, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_walk, "Scheduler", CheckedScheduler)
    for seed in range(2):
        scheduler_walk.walk(seed, 210, state, 4, policy, steps_ahead)


def test_prefix_of_another_salt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scheduler_module, invariants):
        monkeypatch.setattr(module, "root_key", lambda salt, adapter="": b"")
    scheduler = make()
    scheduler.add(request("a"))
    run(scheduler)
    with pytest.raises(InvariantError, match="have the keys of"):
        scheduler.add(request("b", "x"))
    # The hit itself is named too, where the keys were not compared.
    with pytest.raises(InvariantError, match="that no request of its salt"):
        run(scheduler)


def test_shorter_hit_and_missing_page_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hit = PagedGroup.hit
    with monkeypatch.context() as patch:
        patch.setattr(PagedGroup, "hit", lambda self, seq, limit: hit(self, seq, limit - 1))
        scheduler = make()
        scheduler.add(request("a"))
        run(scheduler)
        scheduler.add(request("b"))
        with pytest.raises(InvariantError, match="64 cached tokens, and 128 could be resumed"):
            run(scheduler)
    commit = PagedGroup.commit
    monkeypatch.setattr(PagedGroup, "commit", lambda self, seq, n: commit(self, seq, n - 64))
    scheduler = make()
    scheduler.add(request("a"))
    with pytest.raises(InvariantError, match="page . of request a is full and was not cached"):
        run(scheduler)


def test_page_that_is_cached_before_its_last_token_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit = Cache.commit
    monkeypatch.setattr(Cache, "commit", lambda self, seq, tokens: commit(self, seq, tokens + 1))
    scheduler = make()
    scheduler.add(Request("a", PROMPT[:62], SamplingParams(max_tokens=3, ignore_eos=True)))
    with pytest.raises(InvariantError, match="only 63 tokens of the request are known"):
        run(scheduler)


def test_new_row_without_a_chunk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make()
    plan_prompt = Scheduler._plan_prompt

    def without_b(self: Scheduler, schedule: Schedule) -> Any:
        rows = plan_prompt(self, schedule)
        schedule.prompt = [c for c in schedule.prompt if rows[c.row].request.id != "b"]
        return rows

    monkeypatch.setattr(Scheduler, "_plan_prompt", without_b)
    for name in "ab":
        scheduler.add(request(name, salt=name))
    with pytest.raises(InvariantError, match="have no chunk in their first schedule"):
        run(scheduler)


def test_first_prompt_without_a_chunk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"long": 450, "short": 300}

    def serve() -> None:
        scheduler = make(max_model_len=500)
        for name, length in prompts.items():
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            scheduler.add(Request(name, PROMPT[:1] * length, params, cache_salt=name))
        run(scheduler)

    serve()

    def shortest_first(
        remaining: Sequence[int], minimum: Sequence[int], budget: int, align: int
    ) -> list[int]:
        shares = list(minimum)
        for index in sorted(range(len(remaining)), key=remaining.__getitem__):
            shares[index] += min(remaining[index] - shares[index], budget - sum(shares))
        return shares

    monkeypatch.setattr(scheduler_module, "split_budget", shortest_first)
    with pytest.raises(InvariantError, match="is the first one and has no chunk"):
        serve()


def test_row_that_is_saved_without_its_last_page_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make(query_len=8)
    scheduler.add(Request("a", PROMPT[:60], SamplingParams(max_tokens=50, ignore_eos=True)))
    schedule = scheduler.schedule()
    scheduler.update(schedule, Results({schedule.prompt[0].row: RowResult([5])}))
    # Its results are not read before the row is preempted.
    scheduler.schedule()
    pages_for = Cache.pages_for
    known = scheduler.entries["a"].request.num_tokens
    scheduler.force_preempt("a")
    with monkeypatch.context() as patch:
        preempt = Scheduler._preempt

        def save_known(self: Scheduler, plan: Schedule, entry: Any) -> None:
            preempt(self, plan, entry)
            entry.saved = pages_for(self.cache, known)

        patch.setattr(Scheduler, "_preempt", save_known)
        with pytest.raises(InvariantError, match="preempted with 1 pages, and launched steps"):
            scheduler.schedule()


def test_salted_answer_that_drafters_learn_is_named() -> None:
    scheduler = make()
    for name, salt in (("a", "x"), ("b", "")):
        scheduler.add(request(name, salt))
        run(scheduler)
    salted, other = (known.output_token_ids for known in scheduler.requests)
    scheduler.answers = [other]
    scheduler.schedule()
    scheduler.answers = [salted]
    with pytest.raises(InvariantError, match="the answer of request a, which has a salt"):
        scheduler.schedule()


def test_window_that_ends_past_a_row_is_named() -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, forced_token_ids=[5] * 18)
    for spare_columns in (66, 5):
        scheduler = make(max_num_batched_tokens=256)
        scheduler.plans.spare_columns = spare_columns
        scheduler.add(Request("a", PROMPT, params))
        schedule = scheduler.schedule()
        scheduler.update(schedule, Results({schedule.prompt[0].row: RowResult([5])}))
        if spare_columns == 66:
            assert scheduler.schedule().forced_len == 64
        else:
            with pytest.raises(InvariantError, match="ends 44 tokens after request a, and rows"):
                scheduler.schedule()


def test_prefixes_that_outlive_a_failed_step_are_named() -> None:
    scheduler = make()
    check_no_prefixes(scheduler.cache)
    scheduler.add(request("a"))
    run(scheduler)
    with pytest.raises(InvariantError, match="2 cached pages and snapshots outlive"):
        check_no_prefixes(scheduler.cache)
    scheduler.cache.drop_cached()
    check_no_prefixes(scheduler.cache)


def test_page_that_is_evicted_after_it_was_cached_is_no_fault() -> None:
    """Two rows have equal pages. The one whose page is cached loses it before the next schedule."""
    cache = Cache(CacheConfig(num_pages=5, max_num_seqs=2))
    scheduler = CheckedScheduler(
        cache, query_len=1, max_num_seqs=2, max_num_batched_tokens=128, max_model_len=200
    )
    for name in "ab":
        params = SamplingParams(max_tokens=80, ignore_eos=True)
        scheduler.add(Request(name, PROMPT[:60], params))
    first = scheduler.entries["a"].request
    while scheduler.has_work():
        if first.num_tokens == 129:
            scheduler.force_preempt("a")
        schedule = scheduler.schedule()
        rows = {chunk.row for chunk in schedule.prompt} | set(schedule.decode)
        scheduler.update(schedule, Results({row: RowResult([5]) for row in rows}))
    assert first.metrics.num_preemptions == 1


def test_wrong_padding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Scheduler._choose_drafts

    def widest(self: Scheduler, plan: Any, wants_drafts: bool) -> None:
        choose(self, plan, wants_drafts)
        plan.padded_rows = 2

    monkeypatch.setattr(Scheduler, "_choose_drafts", widest)
    scheduler = make(row_buckets=(1, 2))
    scheduler.add(request("a"))
    with pytest.raises(InvariantError, match="1 rows are padded to 2"):
        run(scheduler)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"num_cached_tokens": 0}, "num_cached_tokens 0 instead of 64"),
        ({"num_preemptions": 2}, "num_preemptions 2 instead of 1"),
        ({"num_steps": 1}, "from 1 steps"),
        ({"num_accepted_tokens": 5}, "more drafts were accepted"),
        ({"finished_time": None}, "it ended with the times"),
        ({"first_token_time": 0.5}, "not in order"),
    ],
)
def test_wrong_metrics(change: dict[str, Any], fault: str | None) -> None:
    metrics = RequestMetrics(1.0, 3.0, 4.0, 64, 4, 2, 2, 1, 2.0)
    for name, value in change.items():
        setattr(metrics, name, value)
    ended = Request("a", PROMPT, finish_reason="length")
    ended.metrics = metrics
    ended.output_token_ids = [5] * 5
    ended.token_sources = ["plain", "draft", "draft", "bonus", "plain"]
    actual = wrong_metrics(Observed(ended, 64, 1, has_failed=False), max_drafts=0)
    assert actual is None if fault is None else fault in str(actual)
