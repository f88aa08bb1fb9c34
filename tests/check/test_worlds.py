"""Worlds are plain data, the same for a seed; they pass on a sound engine and name a fault."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep import spec
from lockstep.cache.cache import Cache
from lockstep.check import (
    SIZES,
    Effort,
    Interrupted,
    Shard,
    read_world,
    run_check,
    run_replay,
)
from lockstep.check.draw import (
    EDGE,
    HOSTED,
    LASTING,
    LONGER,
    PUSHED,
    SELDOM,
    Drawer,
    kind_of,
    kinds_of,
)
from lockstep.check.harness import CheckEngine, build, build_plain
from lockstep.check.plain import PlainRuns
from lockstep.check.rules import WorldError
from lockstep.check.shrink import minimise, smaller
from lockstep.check.stage import Stage
from lockstep.check.world import ROOM, Kind, Limits, World, WorldRequest, write_world
from lockstep.check.worlds import Examiner
from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.kernels.attention import KV_SPLIT
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.scheduler import Scheduler
from lockstep.step import PAGE_SIZE
from tests.check.faulty import off_by_a_bit

DRAFTERS = tuple(spec.DRAFTERS)
WORLD = World(
    Kind("told", 3),
    Limits(pages=4, caching=True),
    (
        WorldRequest(tuple(range(5, 70)), {"max_tokens": 7, "temperature": 0.0, "logprobs": 1}),
        WorldRequest(
            tuple(range(9)), {"max_tokens": 5, "seed": 2**40, "logit_bias": {3: 1.5}}, arrival=2
        ),
    ),
    primed=(tuple(range(5, 71)),),
    dirt=3,
)


@pytest.fixture(scope="module")
def build_kind(model: str) -> Callable[[Kind], CheckEngine]:
    return lambda kind: build(model, {"load_format": "dummy", **kind.settings()}, kind.hooks())


@pytest.fixture(scope="module")
def plain(model: str) -> PlainRuns:
    return PlainRuns(build_plain(model, {"load_format": "dummy"}))


@pytest.fixture
def drawer(plain: PlainRuns) -> Drawer:
    return Drawer(plain, 1, DRAFTERS, ("none",))


def test_a_world_is_plain_data(tmp_path: Path, drawer: Drawer) -> None:
    for world in (WORLD, *(drawer.world(index) for index in range(6))):
        path = tmp_path / "world.json"
        write_world(path, world, what="why")
        assert read_world(path) == world
        assert json.loads(path.read_text())["what"] == "why"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 99}, "version=99 of a world is not allowed; allowed: 1"),
        ({"kind": 5}, "cannot be read"),
        ({"requests": [{"prompt": [1], "params": {"heat": 1}}]}, "params has .'heat'."),
        ({"requests": []}, "requests=0 is not allowed; allowed: whole numbers from 1 to 64"),
        ({"limits": {"pages": 65}}, "pages=65 is not allowed; allowed: whole numbers from 1 to 64"),
        ({"limits": {"rows": 7}}, "rows=7 is not allowed; allowed: whole numbers from 1 to 6"),
    ],
)
def test_a_file_that_is_no_world_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "world.json"
    path.write_text(json.dumps({"world": {**WORLD.to_json(), **change}}))
    with pytest.raises(ConfigError, match=said):
        read_world(path)


def test_a_seed_draws_the_same_worlds(plain: PlainRuns, drawer: Drawer) -> None:
    again = Drawer(plain, 1, DRAFTERS, ("none",))
    other = Drawer(plain, 2, DRAFTERS, ("none",))
    first = [drawer.world(index) for index in range(3)]
    assert [again.world(index) for index in range(3)] == first
    assert other.world(0) != first[0]


def test_some_worlds_have_a_long_prompt_and_some_have_rows_that_are_pushed_out(
    drawer: Drawer,
) -> None:
    for first in (0, SELDOM):
        long = drawer.world(first + LONGER)
        pushed = drawer.world(first + PUSHED)
        assert max(len(a.prompt) for a in long.requests) > 2 * KV_SPLIT
        assert pushed.limits.rows == 2 and pushed.limits.policy == "priority"
        urgent = min(a.priority for a in pushed.requests)
        assert sum(a.priority == urgent for a in pushed.requests) > 5
        late = [
            a for a in pushed.requests if a.priority == max(b.priority for b in pushed.requests)
        ]
        assert len(late) == 2 and [a.abort is None for a in late] == [True, False]


def test_some_answers_last_and_some_end_at_the_engines_length(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    """Longer than a page and than rings of recent tokens are at any K; and where a row's line of
    the table ends, while windows reach past it."""
    drawer = Drawer(plain, 1, ("ngram", "mtp"), ("none",))
    lasting = drawer.world(LASTING)
    assert max(a.params["max_tokens"] for a in lasting.requests) > PAGE_SIZE
    edge = drawer.world(EDGE)
    (last,) = (a for a in edge.requests if len(a.prompt) + a.params["max_tokens"] > ROOM)
    assert edge.alone(last).max_tokens == ROOM - len(last.prompt)
    answer = plain.answers(last.prompt, edge.alone(last))[0]
    assert answer.ending == ("length", None)
    kind = replace(edge.kind, drafter="told", drafts=15)
    assert Examiner(plain, build_kind).examine(replace(edge, kind=kind)).difference is None


def test_room_in_a_plain_run_is_that_of_the_world() -> None:
    given = WorldRequest(tuple(range(30)), {"max_tokens": 20, "min_tokens": 12})
    world = replace(WORLD, requests=(given,), limits=Limits(length=38))
    alone = world.alone(given)
    assert (alone.max_tokens, alone.min_tokens) == (8, 8)
    assert replace(world, limits=Limits()).alone(given) == given.sampling()


def test_some_worlds_have_prompts_that_come_back_from_host_memory(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    drawer = Drawer(plain, 1, ("ngram", "mtp"), ("none",))
    for index in HOSTED:
        world = drawer.world(index)
        assert drawer.wants_host(index) and world.limits.host
        assert {a.salt for a in world.requests} == {"", "of another"}
        played = Stage(build_kind(world.kind), world.kind).play(world, plain)
        assert played.seen["pages from host memory"] > 0


def test_kinds_hold_every_drafter_and_a_checkpoint_without_mtp_has_others() -> None:
    turns = range(2 * len(kinds_of(DRAFTERS)))
    every = [kind_of(0, group, DRAFTERS, ("full", "none")) for group in turns]
    assert {k.drafter for k in every} == {"none", "told", *DRAFTERS}
    assert {k.drafter for k in every if k.changing} == {"told", *DRAFTERS}
    assert {k.graph for k in every} == {"full", "none"}
    without = [kind_of(0, group, ("ngram",), ("none",)) for group in turns]
    assert {k.drafter for k in without} == {"none", "told", "ngram"}


def test_a_fault_is_found_made_small_written_and_replayed(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    off_by_a_bit(monkeypatch)
    monkeypatch.setattr("lockstep.check.run.run_sampling", lambda *rest: None)
    effort = Effort(worlds=3, minimise=600.0, folder=tmp_path, fail_fast=True)
    report = run_check("quick", model, seed=3, effort=effort, load_format="dummy")
    (failure,) = report.failures
    assert failure.setup.phase == "world" and failure.what == "the bits of the logits differ"
    assert failure.file is not None and f"--replay {failure.file}" in report.verdict
    world = read_world(Path(failure.file))
    assert len(world.requests) <= 2 and not world.primed and world.limits.preempt_every == 0
    assert sum(a.params["max_tokens"] for a in world.requests) <= 4
    assert sum(len(a.prompt) for a in world.requests) <= 8
    replayed = run_replay(world, model, load_format="dummy")
    assert replayed.failed == 1 and "look at the sampler" in replayed.verdict
    monkeypatch.undo()
    assert run_replay(world, model, load_format="dummy").failed == 0


def test_a_difference_is_kept_where_making_it_small_is_interrupted(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And its world, as it was found."""

    def interrupted(*rest: Any) -> None:
        raise KeyboardInterrupt

    off_by_a_bit(monkeypatch)
    monkeypatch.setattr("lockstep.check.run.run_sampling", lambda *rest: None)
    monkeypatch.setattr("lockstep.check.worlds.minimise", interrupted)
    with pytest.raises(Interrupted) as ended:
        run_check("quick", model, seed=3, effort=Effort(3, folder=tmp_path), load_format="dummy")
    report = ended.value.report
    (failure,) = report.failures
    assert failure.what == "the bits of the logits differ" and failure.where is None
    assert failure.file is not None and read_world(Path(failure.file)).requests
    assert sum(tally.failed for tally in report.tallies) == 1
    assert re.match(r"Ended early: \d of 3 worlds .* 1 of \d+ cases differ", report.verdict)


def test_an_engine_that_breaks_is_a_difference(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> None:
        raise IndexError("no such row")

    examiner = Examiner(plain, build_kind)
    for request in WORLD.requests:
        plain.answers(request.prompt, request.sampling())
    monkeypatch.setattr(Scheduler, "schedule", broken)
    found = examiner.examine(WORLD).difference
    assert found is not None and found.what == "raised IndexError: no such row"
    assert not found.refused


def test_what_is_refused_is_no_smaller_world(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    examiner = Examiner(plain, build_kind)
    wrong = replace(WORLD.requests[0], params={"min_tokens": 9, "max_tokens": 3})
    found = examiner.examine(replace(WORLD, requests=(wrong,))).difference
    assert found is not None and found.refused
    assert not examiner.differs(replace(WORLD, requests=(wrong,)))


def test_a_stage_sees_what_is_left_behind(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Stage(build_kind(WORLD.kind), WORLD.kind)
    assert len(played.play(WORLD, plain).answers) == 2
    monkeypatch.setattr(Scheduler, "_leave_row", lambda self, entry: self.running.remove(entry))
    with pytest.raises((WorldError, AssertionError)):
        played.play(WORLD, plain)


def test_the_smallest_world_that_differs() -> None:
    """What is at fault: a drafting engine and a penalised request with 3 tokens of prompt."""

    def differs(world: World) -> bool:
        penalised = [a for a in world.requests if "frequency_penalty" in a.params]
        return world.kind.drafts > 0 and any(len(a.prompt) > 2 for a in penalised)

    rng = random.Random(0)
    penalised = WorldRequest(
        tuple(range(100)), {"max_tokens": 9, "frequency_penalty": 2.0, "n": 3}, 4, 9
    )
    others = tuple(
        WorldRequest(tuple(rng.choices(range(50), k=70)), {"max_tokens": 5}) for _ in range(3)
    )
    world = replace(WORLD, requests=(*others[:2], penalised, *others[2:]))
    small = minimise(world, differs, seconds=60.0)
    assert small.kind == Kind("told", 1) and small.limits == Limits() and not small.primed
    (request,) = small.requests
    assert len(request.prompt) == 3 and request.arrival == 0 and request.abort is None
    assert request.params == {"max_tokens": 1, "frequency_penalty": 2.0}
    assert minimise(world, differs, seconds=0.0) == world


def test_smaller_worlds_are_other_worlds(drawer: Drawer) -> None:
    for index in range(4):
        world = drawer.world(index)
        assert all(less != world for less in smaller(world))


def test_the_command_draws_worlds_for_so_long_and_replays_one(model: str, tmp_path: Path) -> None:
    asked = ("check", "--load-format", "dummy", model)
    path = tmp_path / "world.json"
    write_world(path, WORLD)
    shown = CliRunner().invoke(app, [*asked, "--replay", str(path)], catch_exceptions=False)
    assert shown.exit_code == 0 and "2 cases, all equal" in shown.stdout
    found = CliRunner().invoke(app, [*asked, "--replay", str(path), "--json"])
    assert json.loads(found.stdout)["cases"] == 2
    for other in (["--quick"], ["--shard", "1/2"]):
        with pytest.raises(ConfigError, match="--replay runs one world; leave --quick"):
            CliRunner().invoke(app, [*asked, *other, "--replay", "x"], catch_exceptions=False)


def test_seconds_take_the_place_of_a_number_of_worlds(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.check.run.run_matrix", lambda *rest: None)
    monkeypatch.setitem(SIZES, "quick", replace(SIZES["quick"], draws=16))
    effort = Effort(worlds=0, seconds=0.5)
    report = run_check("quick", model, seed=7, effort=effort, load_format="dummy")
    assert report.failed == 0 and report.tallies and report.seed == 7
    assert {t.setup.phase for t in report.tallies} == {"world", "sampling"}


def test_shards_are_the_whole_and_no_part_is_done_twice(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.check.run.Drawer.world", lambda self, index: WORLD)
    monkeypatch.setattr("lockstep.check.run.run_sampling", lambda *rest: None)
    monkeypatch.setattr("lockstep.check.tokens._run_engine", ran := Mock())
    batches = []
    for index in (1, 2, 3):
        effort = Effort(worlds=6, shard=Shard(index, 3))
        report = run_check("quick", model, effort=effort, load_format="dummy")
        batches += [tally.batch for tally in report.tallies]
        assert report.worlds_due == len(report.tallies) == 2
        assert report.to_json()["shard"] == f"{index}/3"
    assert sorted(batches) == sorted(f"world {index}" for index in range(6))
    engines = [call.args[0] for call in ran.call_args_list]
    assert len(engines) == len(set(engines)) > 3


def test_a_file_too_large_for_a_world_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "world.json"
    write_world(path, WORLD)
    monkeypatch.setattr("lockstep.check.world.MOST_BYTES", 99)
    with pytest.raises(ConfigError, match="bytes, at most 99 are allowed"):
        read_world(path)


def test_an_axis_that_never_takes_place_is_a_failure(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that finds nothing in its cache gives right answers and proves nothing."""
    monkeypatch.setattr("lockstep.check.run.run_matrix", lambda *rest: None)
    monkeypatch.setattr("lockstep.check.run.run_sampling", lambda *rest: None)
    monkeypatch.setattr(Cache, "_hit", lambda self, seq: 0)
    monkeypatch.setattr("lockstep.check.worlds.EARLY", 4)
    report = run_check("quick", model, effort=Effort(4), load_format="dummy")
    missed = ["no cached tokens at all", "no pages from host memory at all"]
    assert [f.what for f in report.failures] == missed


def test_plain_runs_are_kept_and_judged(plain: PlainRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=1.0, seed=2**40 + 1, max_tokens=6, logprobs=2, n=2)
    first = plain.answers((1, 2, 3), params)
    assert len(first) == 2 and plain.answers((1, 2, 3), params) is first
    assert plain.judged((1, 2, 3), params) is None
    assert [len(a.digests) for a in first] == [len(a.tokens) for a in first]
    monkeypatch.setattr(
        "lockstep.kernels.sampling.reference.gumbel",
        lambda seed, positions, ids: np.float32(0) * ids,
    )
    found = plain.judged((1, 2, 4), params)
    assert found is not None and "is not the one that the logits and parameters give" in found.what
