"""Worlds written by hand, whose schedules break a rule where the engine has a fault."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.cache.cache import Cache, CacheConfig
from lockstep.cache.groups import CacheSeq, StateGroup
from lockstep.cache.host_tier import PAGES, Move
from lockstep.check.harness import build, build_plain
from lockstep.check.plain import PlainRuns
from lockstep.check.rules import RuledScheduler, Rules, WorldError, shares_no_snapshot
from lockstep.check.stage import Stage
from lockstep.check.world import Kind, Limits, World, WorldRequest
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import PageGrant, PromptChunk, Results, RowResult, Schedule
from lockstep.scheduling.scheduler import Entry, Scheduler
from lockstep.worker.worker import Worker

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LATE = WorldRequest(tuple(range(60)), {**GREEDY, "max_tokens": 9}, priority=1)
"""Its answer begins a page with the token of step 5."""
URGENT = WorldRequest((7, 8), {**GREEDY, "max_tokens": 2})


@pytest.fixture(scope="module")
def plain(model: str) -> PlainRuns:
    return PlainRuns(build_plain(model, {"load_format": "dummy"}))


@pytest.fixture(scope="module")
def play(model: str, plain: PlainRuns) -> Callable[[World], None]:
    stage = Stage(build(model, {"load_format": "dummy", **Kind().settings()}), Kind())
    return lambda world: stage.play(world, plain) and None


def pushed(arrival: int, abort: int | None = None) -> World:
    """The late request has the only row until the urgent one comes."""
    limits = Limits(rows=1, policy="priority")
    requests = (replace(LATE, abort=abort), replace(URGENT, arrival=arrival))
    return World(Kind(), limits, requests)


def test_a_grant_of_a_row_that_is_pushed_out_is_no_other_rows(
    play: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(pushed(5))
    preempt = Scheduler._preempt

    def keeping(self: Scheduler, plan: Schedule, entry: Entry) -> None:
        grants = plan.grants
        preempt(self, plan, entry)
        plan.grants = grants

    monkeypatch.setattr(Scheduler, "_preempt", keeping)
    with pytest.raises(WorldError, match="row 1 was told the pages .* and has"):
        play(pushed(5))


def test_nothing_is_left_in_host_memory_of_a_request_that_ends_there(
    play: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(pushed(3, abort=4))
    launch = Worker.launch
    kept: list[dict[str, Any]] = []

    def launch_without_drops(worker: Worker, schedule: Schedule, fill_masks: FillMasks) -> Any:
        schedule.dropped.clear()
        kept.append(worker.saved)
        return launch(worker, schedule, fill_masks)

    monkeypatch.setattr(Worker, "launch", launch_without_drops)
    with pytest.raises(WorldError, match="1 rows in host memory are left"):
        play(pushed(3, abort=4))
    kept[-1].clear()


def test_a_snapshot_that_a_row_begins_from_is_not_given_away(
    play: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots: the other request takes the one with the snapshot, if nobody holds it."""
    known = tuple(range(129))
    other = tuple(range(9))
    requests = tuple(WorldRequest(prompt, {**GREEDY, "max_tokens": 2}) for prompt in (known, other))
    limits = Limits(rows=2, chunk=192, snapshots=0, caching=True)
    world = World(Kind(), limits, requests, primed=(known,))
    play(world)

    resume = StateGroup.resume

    def let_go(self: StateGroup, seq: CacheSeq, pages: int) -> None:
        resume(self, seq, pages)
        self.settle()

    monkeypatch.setattr(StateGroup, "resume", let_go)
    with pytest.raises(WorldError, match="a snapshot of a step is a row's own slot"):
        play(world)


def scheduled(prompt: list[int]) -> tuple[Rules, Schedule]:
    """The first schedule of a request, and who is to follow it."""
    cache = Cache(CacheConfig(num_pages=9, num_state_slots=4, max_num_seqs=2))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 400}
    scheduler = Scheduler(cache, query_len=1, **sizes)
    scheduler.add(Request("r", prompt))
    return Rules(scheduler), scheduler.schedule()


def test_a_snapshot_is_what_its_key_says() -> None:
    rules, made = scheduled(list(range(100)))
    rules.hold(made)
    (chunk,) = made.prompt
    assert chunk.snapshot_slot and chunk.length == 64
    for wrong in (
        replace(chunk, length=40),
        replace(chunk, length=128),
        replace(chunk, snapshot_slot=0, state_src=chunk.snapshot_slot),
    ):
        with pytest.raises(WorldError, match="is not the snapshot behind"):
            rules.hold(replace(made, prompt=[wrong]))
    rules.scheduler.running[0].request = Request("r", list(range(1, 100)))
    with pytest.raises(WorldError, match="is not the snapshot behind"):
        rules.hold(made)


def test_what_comes_back_is_what_has_left() -> None:
    rules, made = scheduled(list(range(100)))
    cache = rules.scheduler.cache
    rules.hold(made)
    page = cache.seqs.copy().pop().pages[0]
    rules.begin()
    out = replace(made, evicted={PAGES: [Move(page, (3,))]})
    rules.hold(out)
    rules.hold(replace(made, fetched={PAGES: [Move(page, (3,))]}))
    with pytest.raises(WorldError, match="fetched from where another thing is"):
        rules.hold(replace(made, fetched={PAGES: [Move(page, (2,))]}))
    with pytest.raises(WorldError, match="9 was not cached when it was evicted"):
        rules.hold(replace(made, evicted={PAGES: [Move(9, (2,))]}))


def test_a_page_may_leave_by_the_schedule_behind_the_token_that_fills_it() -> None:
    """The first answer ends where its page is full; the next prompt needs all pages at once."""
    cache = Cache(CacheConfig(num_pages=4, num_state_slots=0, max_num_seqs=1, host_pages=4))
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 192, "max_model_len": 180}
    scheduler = RuledScheduler(cache, query_len=1, **sizes)
    answered = Request("first", list(range(60)), SamplingParams(max_tokens=5, ignore_eos=True))
    scheduler.add(answered)
    scheduler.add(Request("second", list(range(170))))
    evicted: list[Move] = []
    while not evicted:
        made = scheduler.schedule()
        evicted = made.evicted.get(PAGES, [])
        rows = {chunk.row for chunk in made.prompt} | set(made.decode)
        scheduler.update(made, Results({row: RowResult([5]) for row in rows}))
    assert answered.finish_reason == "length"
    assert len(evicted) == 1


def test_a_request_begins_with_pages_of_its_own_prompt_and_salt() -> None:
    rules, made = scheduled(list(range(100)))
    rules.hold(made)
    (admission,) = made.admissions
    rules.hold(replace(made, admissions=[replace(admission, start=64)]))
    for other in (
        Request("r", list(range(1, 101))),
        Request("r", list(range(100)), cache_salt="another"),
    ):
        wrong = replace(admission, start=64)
        rules.scheduler.entries["r"].request = other
        with pytest.raises(WorldError, match="is not page 0 of what row 1 asks"):
            rules.hold(replace(made, admissions=[wrong]))


def test_a_snapshot_lies_within_its_chunk() -> None:
    rules, made = scheduled(list(range(100)))
    (chunk,) = made.prompt
    with pytest.raises(WorldError, match="a chunk from 64 to 104 writes a snapshot at 64"):
        rules.hold(replace(made, prompt=[replace(chunk, start=64, length=40)]))


def test_pages_are_granted_to_rows_that_run() -> None:
    rules, made = scheduled(list(range(50)))
    with pytest.raises(WorldError, match="row 2 is granted pages and does not run"):
        rules.hold(replace(made, grants=[PageGrant(2, 0, [3])]))
    with pytest.raises(WorldError, match=r"row 1 was told the pages \[3\] and has \[1\]"):
        rules.hold(replace(made, grants=[PageGrant(1, 0, [3])]))


def test_rows_of_a_step_share_no_snapshot() -> None:
    def chunk(source: int, snapshot: int) -> PromptChunk:
        return PromptChunk(1, 0, 64, False, source, snapshot)

    sound = Schedule(tick=0, prompt=[chunk(3, 4), chunk(3, 5), chunk(0, 0), chunk(0, 0)])
    shares_no_snapshot(sound, {1, 2})
    for wrong in ([chunk(0, 4), chunk(0, 4)], [chunk(4, 5), chunk(0, 4)]):
        with pytest.raises(WorldError, match="a snapshot is written twice"):
            shares_no_snapshot(Schedule(tick=0, prompt=wrong), {1, 2})
    for slot in (3, 4):
        with pytest.raises(WorldError, match="a row's own slot"):
            shares_no_snapshot(sound, {1, slot})
