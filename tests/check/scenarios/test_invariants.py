"""Scenarios and schedules written by hand that violate an invariant if the engine has a fault."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import CacheSeq, StateGroup
from lockstep.cache.host_tier import PAGES, Move
from lockstep.check.engines import build, build_plain
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.scenarios.invariants import (
    CheckedScheduler,
    InvariantError,
    ScheduleInvariants,
    check_snapshots,
    raise_if,
)
from lockstep.check.scenarios.runner import ScenarioRunner
from lockstep.check.scenarios.scenario import (
    IN_HOST_MEMORY,
    NEVER,
    Kind,
    Limits,
    Scenario,
    ScenarioRequest,
    WarmPrefix,
)
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import PageGrant, PromptChunk, Results, RowResult, Schedule
from lockstep.scheduling.scheduler import ScheduledRequest, Scheduler
from lockstep.worker import executor
from lockstep.worker.row_table import RowTable
from lockstep.worker.worker import Worker
from tests.thread_ranks import ThreadRanks

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LATE = ScenarioRequest(tuple(range(60)), {**GREEDY, "max_tokens": 9}, priority=1)
"""Request whose output begins a new page with the token of step 5."""
URGENT = ScenarioRequest((7, 8), {**GREEDY, "max_tokens": 2})


@pytest.fixture(scope="module")
def plain(model: str) -> PlainRuns:
    return PlainRuns(build_plain(model, {"load_format": "dummy"}))


@pytest.fixture(scope="module")
def play(model: str, plain: PlainRuns) -> Callable[[Scenario], None]:
    runner = ScenarioRunner(build(model, {"load_format": "dummy", **Kind().settings()}), Kind())

    def checked(scenario: Scenario) -> None:
        result = runner.play(scenario, plain)
        raise_if(result.violation or result.fault)

    return checked


def preemption_scenario(arrival: int, abort: str = NEVER) -> Scenario:
    """Return a scenario whose only row belongs to LATE until URGENT arrives."""
    limits = Limits(rows=1, policy="priority")
    requests = (replace(LATE, abort=abort), replace(URGENT, arrival=arrival))
    return Scenario(Kind(), limits, requests)


def test_pages_of_a_preempted_row_do_not_go_to_another(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(preemption_scenario(5))
    preempt = Scheduler._preempt

    def keeping(self: Scheduler, plan: Schedule, entry: ScheduledRequest) -> None:
        grants = plan.grants
        preempt(self, plan, entry)
        plan.grants = grants

    monkeypatch.setattr(Scheduler, "_preempt", keeping)
    with pytest.raises(InvariantError, match="row 1 has the pages .* but the schedules gave it"):
        play(preemption_scenario(5))


def test_a_row_that_returns_without_a_part_of_its_line_is_named(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = preemption_scenario(5)
    late, urgent = scenario.requests
    stops = {"stop_token_ids": [11, 12], "min_tokens": 9}
    scenario = replace(scenario, requests=(replace(late, params={**late.params, **stops}), urgent))
    play(scenario)
    row_tensors = RowTable.row_tensors

    def without_stop_ids(table: RowTable) -> list[Tensor]:
        return [t for t in row_tensors(table) if t is not table.sampling.stop_ids]

    monkeypatch.setattr(RowTable, "row_tensors", without_stop_ids)
    with pytest.raises(InvariantError, match="returns to row 1 without its line of a torch.int64"):
        play(scenario)


def test_ranks_poison_the_line_of_a_row_that_leaves_alike(
    model: str, plain: PlainRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    monkeypatch.setattr(executor, "AUDIT_EVERY", 1)
    settings = {"load_format": "dummy", "tensor_parallel_size": 2, **Kind().settings()}
    runner = ScenarioRunner(build(model, settings), Kind())
    result = runner.play(preemption_scenario(5), plain)
    assert result.fault is result.violation is None and result.answers


def test_a_request_aborted_in_host_memory_frees_it(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(preemption_scenario(3, abort=IN_HOST_MEMORY))
    launch = Worker.launch
    saved: list[dict[str, Any]] = []

    def launch_without_drops(worker: Worker, schedule: Schedule, fill_masks: FillMasks) -> Any:
        schedule.dropped.clear()
        saved.append(worker.saved)
        return launch(worker, schedule, fill_masks)

    monkeypatch.setattr(Worker, "launch", launch_without_drops)
    with pytest.raises(InvariantError, match="1 rows in host memory remain"):
        play(preemption_scenario(3, abort=IN_HOST_MEMORY))
    saved[-1].clear()


def test_snapshot_in_use_is_not_reassigned(
    play: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two state slots, the second request gets the snapshot unless it is pinned."""
    cached = tuple(range(129))
    other = tuple(range(9))
    requests = tuple(
        ScenarioRequest(prompt, {**GREEDY, "max_tokens": 2}) for prompt in (cached, other)
    )
    limits = Limits(rows=2, chunk=192, snapshots=0, caching=True)
    scenario = Scenario(Kind(), limits, requests, warm_prefixes=(WarmPrefix(cached),))
    play(scenario)

    resume = StateGroup.resume

    def unpinned(self: StateGroup, seq: CacheSeq, pages: int) -> None:
        resume(self, seq, pages)
        self.end_schedule()

    monkeypatch.setattr(StateGroup, "resume", unpinned)
    with pytest.raises(InvariantError, match="a snapshot of a step is a row's own slot"):
        play(scenario)


def first_schedule(prompt: list[int]) -> tuple[ScheduleInvariants, Schedule]:
    """Return the first schedule of a request, and the invariants of its scheduler."""
    cache = Cache(CacheConfig(num_pages=9, num_state_slots=4, max_num_seqs=2))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 400}
    scheduler = Scheduler(cache, query_len=1, **sizes)
    scheduler.add(Request("r", prompt))
    return ScheduleInvariants(scheduler), scheduler.schedule()


def test_a_snapshot_must_have_the_key_of_its_prompt() -> None:
    invariants, schedule = first_schedule(list(range(100)))
    invariants.check(schedule)
    (chunk,) = schedule.prompt
    assert chunk.snapshot_slot and chunk.length == 64
    for wrong in (
        replace(chunk, length=40),
        replace(chunk, length=128),
        replace(chunk, snapshot_slot=0, state_src=chunk.snapshot_slot),
    ):
        with pytest.raises(InvariantError, match="is not the snapshot after"):
            invariants.check(replace(schedule, prompt=[wrong]))
    invariants.scheduler.running[0].request = Request("r", list(range(1, 100)))
    with pytest.raises(InvariantError, match="is not the snapshot after"):
        invariants.check(schedule)


def test_host_memory_returns_the_evicted_page() -> None:
    invariants, schedule = first_schedule(list(range(100)))
    cache = invariants.scheduler.cache
    invariants.check(schedule)
    page = cache.seqs.copy().pop().pages[0]
    invariants.begin()
    out = replace(schedule, evicted={PAGES: [Move(page, (3,))]})
    invariants.check(out)
    invariants.check(replace(schedule, fetched={PAGES: [Move(page, (3,))]}))
    with pytest.raises(InvariantError, match="is loaded from host pages with other contents"):
        invariants.check(replace(schedule, fetched={PAGES: [Move(page, (2,))]}))
    with pytest.raises(InvariantError, match="9 was not cached when it was evicted"):
        invariants.check(replace(schedule, evicted={PAGES: [Move(9, (2,))]}))


def test_a_page_may_be_evicted_right_after_the_token_that_fills_it() -> None:
    """The first answer ends where its page is full; the next prompt needs all pages at once."""
    cache = Cache(CacheConfig(num_pages=4, num_state_slots=0, max_num_seqs=1, host_pages=4))
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 192, "max_model_len": 180}
    scheduler = CheckedScheduler(cache, query_len=1, **sizes)
    answered = Request("first", list(range(60)), SamplingParams(max_tokens=5, ignore_eos=True))
    scheduler.add(answered)
    scheduler.add(Request("second", list(range(170))))
    evicted: list[Move] = []
    while not evicted:
        schedule = scheduler.schedule()
        evicted = schedule.evicted.get(PAGES, [])
        rows = {chunk.row for chunk in schedule.prompt} | set(schedule.decode)
        scheduler.update(schedule, Results({row: RowResult([5]) for row in rows}))
    assert answered.finish_reason == "length"
    assert len(evicted) == 1


def test_cached_pages_must_match_prompt_and_salt() -> None:
    invariants, schedule = first_schedule(list(range(100)))
    invariants.check(schedule)
    (admission,) = schedule.admissions
    invariants.check(replace(schedule, admissions=[replace(admission, start=64)]))
    for other in (
        Request("r", list(range(1, 101))),
        Request("r", list(range(100)), cache_salt="another"),
    ):
        wrong = replace(admission, start=64)
        invariants.scheduler.entries["r"].request = other
        with pytest.raises(InvariantError, match="is not page 0 of the prompt of row 1"):
            invariants.check(replace(schedule, admissions=[wrong]))


def test_a_snapshot_is_within_its_chunk() -> None:
    invariants, schedule = first_schedule(list(range(100)))
    (chunk,) = schedule.prompt
    with pytest.raises(InvariantError, match="a chunk from 64 to 104 writes a snapshot at 64"):
        invariants.check(replace(schedule, prompt=[replace(chunk, start=64, length=40)]))


def test_only_running_rows_get_pages() -> None:
    invariants, schedule = first_schedule(list(range(50)))
    with pytest.raises(InvariantError, match="row 2 gets pages but is not running"):
        invariants.check(replace(schedule, grants=[PageGrant(2, 0, [3])]))
    with pytest.raises(
        InvariantError, match=r"has the pages \[1\], but the schedules gave it \[3\]"
    ):
        invariants.check(replace(schedule, grants=[PageGrant(1, 0, [3])]))


def test_rows_of_a_step_share_no_snapshot() -> None:
    def chunk(source: int, snapshot: int) -> PromptChunk:
        return PromptChunk(1, 0, 64, False, source, snapshot)

    sound = Schedule(tick=0, prompt=[chunk(3, 4), chunk(3, 5), chunk(0, 0), chunk(0, 0)])
    check_snapshots(sound, {1, 2})
    for wrong in ([chunk(0, 4), chunk(0, 4)], [chunk(4, 5), chunk(0, 4)]):
        with pytest.raises(InvariantError, match="a snapshot is written twice"):
            check_snapshots(Schedule(tick=0, prompt=wrong), {1, 2})
    for slot in (3, 4):
        with pytest.raises(InvariantError, match="a row's own slot"):
            check_snapshots(sound, {1, slot})
