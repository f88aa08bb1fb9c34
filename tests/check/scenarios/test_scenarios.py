"""Scenarios are deterministic and plain data; a fault is found, shrunk, written and replayed."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lockstep import spec
from lockstep.cache.cache import Cache
from lockstep.check import (
    SIZES,
    Effort,
    Interrupted,
    Shard,
    read_scenario,
    run_check,
    run_replay,
)
from lockstep.check.engines import CheckEngine, Processors, build, build_plain
from lockstep.check.events import JOINT_STEPS
from lockstep.check.judges import numpy_sampler
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.random_adapters import RandomAdapters
from lockstep.check.report.report import SCENARIOS, Report
from lockstep.check.scenarios import runner
from lockstep.check.scenarios.driver import FAILED_STEPS, OTHER_ROWS, REUSED_IDS
from lockstep.check.scenarios.examiner import Examiner, run_scenarios
from lockstep.check.scenarios.generator import ScenarioGenerator
from lockstep.check.scenarios.invariants import ANOTHER_ROW, LATER, raise_if
from lockstep.check.scenarios.inventory import rows_and_units
from lockstep.check.scenarios.runner import ScenarioRunner
from lockstep.check.scenarios.scenario import (
    AFTER_LAUNCH,
    AT_RESULTS,
    BEFORE_STEP,
    IN_ANSWER,
    IN_FLIGHT,
    IN_HOST_MEMORY,
    IN_PROMPT,
    WAITING,
    Kind,
    Limits,
    Scenario,
    ScenarioRequest,
    WarmPrefix,
    write_scenario,
)
from lockstep.check.scenarios.shrink import minimise, smaller
from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.outputs import ForcedMismatch
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.scheduler import Scheduler
from lockstep.scheduling.waiting_queue import WaitingQueue
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.joint_steps import JointSteps
from lockstep.worker.worker import LaunchedRow, Worker
from tests.bundled_model import make_engine
from tests.check.faulty import flip_last_logit_bit

DRAFTERS = tuple(spec.DRAFTERS)
SCENARIO = Scenario(
    Kind("oracle", 3),
    Limits(pages=4, caching=True),
    (
        ScenarioRequest(tuple(range(5, 70)), {"max_tokens": 7, "temperature": 0.0, "logprobs": 1}),
        ScenarioRequest(
            tuple(range(9)), {"max_tokens": 5, "seed": 2**40, "logit_bias": {3: 1.5}}, arrival=2
        ),
    ),
    warm_prefixes=(WarmPrefix(tuple(range(5, 71))),),
    poison_seed=3,
)


@pytest.fixture(scope="module")
def processors() -> Processors:
    return {}


@pytest.fixture(scope="module")
def build_kind(model: str, processors: Processors) -> Callable[[Kind], CheckEngine]:
    shared = {"load_format": "dummy"}
    return lambda kind: build(model, {**shared, **kind.settings()}, kind.hooks(), processors)


@pytest.fixture(scope="module")
def plain(model: str, processors: Processors) -> PlainRuns:
    settings = {"load_format": "dummy"}
    engine = build_plain(model, settings, processors)
    adapters = RandomAdapters(worker_of(engine.engine).model)
    return PlainRuns(
        engine, lambda: build_plain(model, {**settings, **adapters.settings()}, processors)
    )


def generator_of(plain: PlainRuns, seed: int) -> ScenarioGenerator:
    """Return a generator of scenarios of two requests."""
    return ScenarioGenerator(plain, seed, DRAFTERS, ("none",), num_requests=2)


@pytest.fixture
def generator(plain: PlainRuns) -> ScenarioGenerator:
    return generator_of(plain, 1)


def test_scenario_round_trips_through_json(tmp_path: Path, generator: ScenarioGenerator) -> None:
    for scenario in (SCENARIO, *(generator.scenario(index) for index in range(1))):
        path = tmp_path / "scenario.json"
        write_scenario(path, scenario, what="why")
        assert read_scenario(path) == scenario
        assert json.loads(path.read_text())["what"] == "why"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version=99 of a scenario is not allowed; allowed: 7"),
        ({"kind": 5}, "the scenario is malformed"),
        ({"requests": [{"prompt": [1], "params": {"heat": 1}}]}, "params has .'heat'."),
        ({"requests": []}, "requests=0 is not allowed; allowed: whole numbers from 1 to 64"),
        ({"limits": {"pages": 65}}, "pages=65 is not allowed; allowed: whole numbers from 1 to 64"),
        ({"limits": {"failure": "later"}}, "failure='later' is not allowed; allowed: none, before"),
        ({"limits": {"rows": 7}}, "rows=7 is not allowed; allowed: whole numbers from 1 to 6"),
    ],
)
def test_a_malformed_scenario_file_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps({"scenario": {**SCENARIO.to_json(), **change}}))
    with pytest.raises(ConfigError, match=message):
        read_scenario(path)


def test_same_seed_generates_same_scenarios(plain: PlainRuns, generator: ScenarioGenerator) -> None:
    again = generator_of(plain, 1)
    other = generator_of(plain, 2)
    first = [generator.scenario(index) for index in range(3)]
    assert [again.scenario(index) for index in range(3)] == first
    assert other.scenario(0) != first[0]


def test_plain_run_has_the_scenarios_length_limit() -> None:
    request = ScenarioRequest(tuple(range(30)), {"max_tokens": 20, "min_tokens": 12})
    scenario = replace(SCENARIO, requests=(request,), limits=Limits(length=38))
    alone = scenario.plain_params(request)
    assert (alone.max_tokens, alone.min_tokens) == (8, 8)
    assert replace(scenario, limits=Limits()).plain_params(request) == request.sampling()


@pytest.mark.slow
def test_fault_is_shrunk_written_and_replayed(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flip_last_logit_bit(monkeypatch)
    effort = Effort(scenarios=3, minimise=600.0, folder=tmp_path, fail_fast=True)
    options: Any = {"seed": 3, "sections": ("tokens",), "load_format": "dummy"}
    report = run_check("quick", model, effort=effort, **options)
    (failure,) = report.failures
    assert failure.setup.phase == "scenario" and failure.what == "the bits of the logits differ"
    assert failure.file is not None and f"--replay {failure.file}" in report.verdict
    scenario = read_scenario(Path(failure.file))
    assert (
        len(scenario.requests) <= 2
        and not scenario.warm_prefixes
        and scenario.limits.preempt_every == 0
    )
    assert sum(a.params["max_tokens"] for a in scenario.requests) <= 4
    assert sum(len(a.prompt) for a in scenario.requests) <= 8
    replayed = run_replay(scenario, model, load_format="dummy")
    assert replayed.failed == 1 and "look at the sampler" in replayed.verdict
    monkeypatch.undo()
    assert run_replay(scenario, model, load_format="dummy").failed == 0


def test_difference_survives_interrupted_shrinking(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The unshrunk scenario is written before shrinking starts."""

    def interrupted(*rest: Any) -> None:
        raise KeyboardInterrupt

    flip_last_logit_bit(monkeypatch)
    monkeypatch.setattr("lockstep.check.scenarios.examiner.minimise", interrupted)
    options: Any = {"seed": 3, "sections": ("tokens",), "load_format": "dummy"}
    with pytest.raises(Interrupted) as ended:
        run_check("quick", model, effort=Effort(3, folder=tmp_path), **options)
    report = ended.value.report
    (failure,) = report.failures
    assert failure.what == "the bits of the logits differ" and failure.where is None
    assert failure.file is not None and read_scenario(Path(failure.file)).requests
    assert sum(tally.failed for tally in report.tallies) == 1
    assert re.match(r"Stopped early: \d of 3 scenarios .* 1 of \d+ cases differ", report.verdict)


def test_engine_exception_is_a_difference(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> None:
        raise IndexError("no such row")

    examiner = Examiner(plain, build_kind)
    for request in SCENARIO.requests:
        plain.answers(request.prompt, request.sampling())
    monkeypatch.setattr(Scheduler, "schedule", broken)
    difference = examiner.examine(SCENARIO).difference
    assert difference is not None and difference.what == "raised IndexError: no such row"
    assert not difference.refused


@pytest.mark.parametrize("flips", [False, True])
def test_answer_that_differs_is_named_before_its_metrics(
    plain: PlainRuns,
    build_kind: Callable[[Kind], CheckEngine],
    monkeypatch: pytest.MonkeyPatch,
    flips: bool,
) -> None:
    examiner = Examiner(plain, build_kind)
    assert examiner.examine(SCENARIO).difference is None
    monkeypatch.setattr(runner, "wrong_metrics", lambda *_: "a metric is wrong")
    if flips:
        flip_last_logit_bit(monkeypatch)
    difference = examiner.examine(SCENARIO).difference
    assert difference is not None
    assert (difference.what == "the bits of the logits differ") == flips
    assert difference.what.endswith("a metric is wrong") != flips
    assert (difference.request is None) != flips
    assert examiner._runner is None, "the next scenario gets a new engine"


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("fault", ["none", "index", "end"])
def test_wrong_forced_token_is_reported_where_it_is(
    plain: PlainRuns,
    build_kind: Callable[[Kind], CheckEngine],
    monkeypatch: pytest.MonkeyPatch,
    reports: bool,
    fault: str,
) -> None:
    """The answer ends before the token, or goes on with it."""
    examiner = Examiner(plain, build_kind)
    request = replace(SCENARIO.requests[0], forced=5, wrong=3, reports=reports)
    scenario = replace(SCENARIO, requests=(request, SCENARIO.requests[1]))
    if fault == "index":
        monkeypatch.setattr(
            "lockstep.scheduling.scheduler.ForcedMismatch",
            lambda index, forced, chosen: ForcedMismatch(index - 1, forced, chosen),
        )
    if fault == "end":

        def wrongly_ends(request: Request) -> bool:
            """Go on where the answer must end, and end it where it must go on."""
            is_there = request.metrics.forced_mismatch is not None
            if is_there and request.params.forced_mismatch == "report":
                request.finish_reason = "error"
                return True
            return False

        monkeypatch.setattr(Request, "_ends_by_mismatch", wrongly_ends)
    difference = examiner.examine(scenario).difference
    assert (difference is None) == (fault == "none")


def difference_of(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], request: ScenarioRequest
) -> Any:
    """Return the difference of a scenario of one request."""
    scenario = replace(SCENARIO, requests=(request,))
    return Examiner(plain, build_kind).examine(scenario).difference


def test_wrong_forced_token_may_have_a_stop_string(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    assert plain.llm.tokenizer is not None
    id_of = plain.llm.tokenizer.fast.token_to_id
    # Each wrong token is the letter after an allowed one.
    params = {
        **SCENARIO.requests[0].params,
        "allowed_token_ids": [id_of("a"), id_of("c")],
        "stop": ["b", "d"],
    }
    request = replace(SCENARIO.requests[0], params=params, forced=5, wrong=0, reports=True)
    (answer,) = plain.answers(request.prompt, request.sampling())
    assert answer.ending == ("length", None)
    assert difference_of(plain, build_kind, request) is None


@pytest.mark.parametrize("wrong", [2, 3])
def test_answer_may_end_within_a_character_before_a_wrong_forced_token(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], wrong: int
) -> None:
    assert plain.llm.tokenizer is not None
    first, second = map(plain.llm.tokenizer.fast.token_to_id, "\u00c3\u00a9")  # the bytes of é
    params = {
        **SCENARIO.requests[0].params,
        "allowed_token_ids": [first, second],
        "bad_words_ids": [[first, first], [second, second]],
    }
    request = replace(SCENARIO.requests[0], params=params, forced=5, wrong=wrong)
    (answer,) = plain.answers(request.prompt, request.sampling())
    assert "\u00e9\u00e9" in answer.text
    assert difference_of(plain, build_kind, request) is None


def test_refused_scenario_does_not_count_as_differing(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    examiner = Examiner(plain, build_kind)
    refused = replace(SCENARIO.requests[0], params={"min_tokens": 9, "max_tokens": 3})
    difference = examiner.examine(replace(SCENARIO, requests=(refused,))).difference
    assert difference is not None and difference.refused
    assert not examiner.differs(replace(SCENARIO, requests=(refused,)), plain=True)


def test_shrinking_keeps_to_the_run_that_was_wrong(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shrunk request may have a fault of its plain run, which is another fault."""
    examiner = Examiner(plain, build_kind)
    request = replace(SCENARIO.requests[0], params={"max_tokens": 3, "seed": 77})
    monkeypatch.setattr(numpy_sampler, "wrong_end", lambda *_: "it ended too early")
    scenario = replace(SCENARIO, requests=(request,))
    assert examiner.differs(scenario, plain=True)
    assert not examiner.differs(scenario, plain=False)


@pytest.mark.parametrize("flips", [False, True])
def test_answer_that_differs_is_named_before_a_violated_invariant(
    plain: PlainRuns,
    build_kind: Callable[[Kind], CheckEngine],
    monkeypatch: pytest.MonkeyPatch,
    flips: bool,
) -> None:
    """The invariant ends the run, in which a token may have differed before."""
    steps = count()

    def violated(self: Cache) -> None:
        raise_if("a page is lost" if next(steps) == 4 else None)

    if flips:
        flip_last_logit_bit(monkeypatch)
    monkeypatch.setattr(Cache, "check", violated)
    examiner = Examiner(plain, build_kind)
    difference = examiner.examine(SCENARIO).difference
    assert difference is not None
    expected = "raised InvariantError: a page is lost"
    if flips:
        expected = f"the bits of the logits differ; then the run {expected}"
    assert difference.what == expected
    assert (difference.request is None) != flips
    assert examiner._runner is None, "the next scenario gets a new engine"


def test_runner_detects_leaked_rows(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = ScenarioRunner(build_kind(SCENARIO.kind), SCENARIO.kind)
    sound = played.play(SCENARIO, plain)
    assert len(sound.answers) == 2 and sound.fault is None
    monkeypatch.setattr(Scheduler, "_leave_row", lambda self, entry: self.running.remove(entry))
    assert played.play(SCENARIO, plain).fault


def test_shrinking_finds_the_smallest_scenario() -> None:
    """The fault needs a drafting engine and a penalised request with 3 tokens of prompt."""

    def differs(scenario: Scenario) -> bool:
        penalised = [a for a in scenario.requests if "frequency_penalty" in a.params]
        return scenario.kind.drafts > 0 and any(len(a.prompt) > 2 for a in penalised)

    rng = random.Random(0)
    penalised = ScenarioRequest(
        tuple(range(100)), {"max_tokens": 9, "frequency_penalty": 2.0, "n": 3}, 4, IN_ANSWER
    )
    other_requests = tuple(
        ScenarioRequest(tuple(rng.choices(range(50), k=70)), {"max_tokens": 5}) for _ in range(3)
    )
    scenario = replace(SCENARIO, requests=(*other_requests[:2], penalised, *other_requests[2:]))
    smallest = minimise(scenario, differs, seconds=60.0)
    assert (
        smallest.kind == Kind("oracle", 1)
        and smallest.limits == Limits()
        and not smallest.warm_prefixes
    )
    (request,) = smallest.requests
    assert len(request.prompt) == 3 and request.arrival == 0 and not request.abort
    assert request.params == {"max_tokens": 1, "frequency_penalty": 2.0}
    assert minimise(scenario, differs, seconds=0.0) == scenario


def test_smaller_scenarios_differ_from_the_original(generator: ScenarioGenerator) -> None:
    for index in range(4):
        scenario = generator.scenario(index)
        assert all(less != scenario for less in smaller(scenario))


def test_command_replays_a_scenario(model: str, tmp_path: Path) -> None:
    arguments = ("check", "--load-format", "dummy", model)
    path = tmp_path / "scenario.json"
    write_scenario(path, SCENARIO)
    result = CliRunner().invoke(app, [*arguments, "--replay", str(path)], catch_exceptions=False)
    assert result.exit_code == 0 and "2 cases, all equal" in result.stdout
    result = CliRunner().invoke(app, [*arguments, "--replay", str(path), "--json"])
    assert json.loads(result.stdout)["cases"] == 2
    for other in (["--quick"], ["--shard", "1/2"]):
        with pytest.raises(ConfigError, match="--replay runs one file; leave --quick"):
            CliRunner().invoke(app, [*arguments, *other, "--replay", "x"], catch_exceptions=False)


def test_time_limit_replaces_the_number_of_scenarios(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.check.run._matrix_parts", lambda *rest: ())
    monkeypatch.setitem(SIZES, "quick", replace(SIZES["quick"], num_samples=16))
    effort = Effort(scenarios=0, seconds=0.5)
    sections = ("tokens", "sampling")
    report = run_check(
        "quick", model, seed=7, effort=effort, sections=sections, load_format="dummy"
    )
    assert report.failed == 0 and report.tallies and report.seed == 7
    assert {t.setup.phase for t in report.tallies} == {"scenario", "sampling"}


@pytest.mark.slow
def test_shards_cover_every_scenario_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.check.run.ScenarioGenerator.scenario", lambda self, index: SCENARIO
    )
    monkeypatch.setattr("lockstep.check.matrix.tokens._run_engine", ran := Mock())
    batches = []
    for index in (1, 2, 3):
        effort = Effort(scenarios=6, shard=Shard(index, 3))
        options: Any = {"sections": ("tokens", "cache"), "load_format": "dummy"}
        report = run_check("quick", model, effort=effort, **options)
        batches += [tally.batch for tally in report.tallies]
        assert report.planned[SCENARIOS] == len(report.tallies) == 2
        assert report.to_json()["shard"] == f"{index}/3"
    assert sorted(batches) == sorted(f"scenario {index}" for index in range(6))
    engines = [call.args[0] for call in ran.call_args_list]
    assert len(engines) == len(set(engines)) > 3


def test_large_scenario_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scenario.json"
    write_scenario(path, SCENARIO)
    monkeypatch.setattr("lockstep.check.scenarios.scenario.MAX_BYTES", 99)
    with pytest.raises(ConfigError, match="bytes, at most 99 are allowed"):
        read_scenario(path)


def test_plain_runs_are_cached_and_judged(
    plain: PlainRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.0, seed=2**40 + 1, max_tokens=6, logprobs=2, n=2)
    first = plain.answers((1, 2, 3), params)
    assert len(first) == 2 and plain.answers((1, 2, 3), params) is first
    assert plain.fault_of((1, 2, 3), params) is None
    assert [len(a.digests) for a in first] == [len(a.tokens) for a in first]
    monkeypatch.setattr(
        "lockstep.kernels.sampling.reference._to_gumbel",
        lambda numbers: np.float32(0) * numbers,
    )
    fault = plain.fault_of((1, 2, 4), params)
    assert fault is not None and "is not the one that the logits and parameters give" in fault.what


def test_client_keeps_prompt_logprobs_where_a_request_begins_again(plain: PlainRuns) -> None:
    """A step failed after its first token; an abort may then find them half computed."""
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, detokenize=False)
    (completion,) = plain.engine.completions("again", (1, 2, 3), params)
    plain.engine.serve([completion])
    logprobs = completion.answer().prompt_logprobs
    completion.request.restart()
    assert len(logprobs) == 2 and completion.answer().prompt_logprobs == logprobs


PHASED = ScenarioRequest(
    tuple(range(3, 200)), {"max_tokens": 12, "temperature": 0.7, "seed": 5, "ignore_eos": True}
)
"""Request of several chunks and steps, which tests preempt and abort."""
OTHER = ScenarioRequest(tuple(range(40, 90)), {"max_tokens": 14, "ignore_eos": True, "seed": 1})


def play(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], scenario: Scenario
) -> tuple[Any, set[tuple[str, str]]]:
    """Compare a scenario; return its counters and the events of its first request."""
    examination = Examiner(plain, build_kind).examine(scenario)
    assert examination.difference is None, examination.difference
    return examination.events, examination.met[0]


@pytest.mark.parametrize("phase", [WAITING, IN_PROMPT, IN_ANSWER, IN_FLIGHT, IN_HOST_MEMORY])
def test_request_is_aborted_in_every_phase_and_its_id_used_again(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], phase: str
) -> None:
    preempt = (IN_ANSWER,) if phase == IN_HOST_MEMORY else ()
    request = replace(PHASED, abort=phase, again=True, preempt=preempt, returns=LATER)
    kind = Kind("oracle", 3, in_flight=2 if phase == IN_FLIGHT else 1)
    scenario = Scenario(kind, Limits(chunk=64), (request, OTHER))
    events, met = play(plain, build_kind, scenario)
    assert ("aborted", phase) in met and events[REUSED_IDS] == 1
    assert events["completions aborted in host memory"] == (phase == IN_HOST_MEMORY)


@pytest.mark.parametrize("phase", [IN_PROMPT, IN_ANSWER])
@pytest.mark.parametrize("returns", [ANOTHER_ROW, LATER])
def test_preempted_request_returns_under_another_row_or_later(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], phase: str, returns: str
) -> None:
    request = replace(PHASED, preempt=(phase,), returns=returns)
    limits = Limits(chunk=512 if phase == IN_ANSWER else 64)
    scenario = Scenario(Kind("oracle", 3), limits, (request, OTHER))
    events, met = play(plain, build_kind, scenario)
    assert {("preempted", phase), ("return", returns)} <= met
    # In the answer both run, and exchange their rows. In the prompt the other one waits.
    expected = 2 if phase == IN_ANSWER else 1
    assert returns != ANOTHER_ROW or events[OTHER_ROWS] == expected


def test_joint_steps_are_counted(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    launch = Worker._launch

    def counted(worker: Worker, steps: Any, *arguments: Any) -> Any:
        passes.append(len(steps))
        return launch(worker, steps, *arguments)

    monkeypatch.setattr(Worker, "_launch", counted)
    requests = (OTHER, replace(PHASED, arrival=3))
    scenario = Scenario(Kind("oracle", 3), Limits(chunk=64), requests)
    events, _ = play(plain, build_kind, scenario)
    assert events[JOINT_STEPS] == passes.count(2) > 1
    monkeypatch.setattr(JointSteps, "join", lambda *arguments: None)
    events, _ = play(plain, build_kind, scenario)
    assert events[JOINT_STEPS] == 0


def test_joint_steps_of_checked_engines_need_no_earlier_use(plain: PlainRuns) -> None:
    steps = worker_of(plain.engine.engine).joint_steps
    limits = replace(steps.limits, device="cuda", graph_mode="full", prompt_buckets=(256,))
    on_gpu = JointSteps(replace(limits, joint_graphs=2))
    decode = StepShape.uniform(steps.limits.row_buckets[-1], 1)
    assert on_gpu.join(decode, [64]) is None
    on_gpu.uses_before_capture = steps.uses_before_capture
    assert on_gpu.join(decode, [64]) is not None


@pytest.mark.parametrize(("count", "faults"), [(0, ["no scenario had joint steps"]), (1, [])])
def test_scenarios_on_a_cpu_must_have_a_joint_step(
    plain: PlainRuns,
    build_kind: Callable[[Kind], CheckEngine],
    generator: ScenarioGenerator,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    faults: list[str],
) -> None:
    monkeypatch.setattr("lockstep.check.scenarios.examiner.MIN_SCENARIOS", 0)
    monkeypatch.setattr("lockstep.check.scenarios.examiner.REQUIRED_EVENTS", ())
    report = Report("quick", exercised={JOINT_STEPS: count})
    effort = Effort(scenarios=0)
    run_scenarios(generator, Examiner(plain, build_kind), effort, report, lambda *arguments: None)
    assert [failure.what for failure in report.failures] == faults


def test_queue_that_loses_its_order_when_it_is_rebuilt_is_named(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = tuple(replace(OTHER, priority=priority) for priority in (2, 1, 0))
    scenario = Scenario(Kind(), Limits(rows=1, policy="priority"), requests)
    play(plain, build_kind, scenario)
    remove = WaitingQueue.remove

    def rebuilt_by_arrival(queue: Any, entry: Any) -> None:
        before = len(queue._heap)
        remove(queue, entry)
        if len(queue._heap) < before:
            queue._heap = list(queue._entries)

    monkeypatch.setattr(WaitingQueue, "remove", rebuilt_by_arrival)
    difference = Examiner(plain, build_kind).examine(scenario).difference
    assert difference is not None and "got rows in this order, against" in difference.what


@pytest.mark.parametrize("returns", [ANOTHER_ROW, LATER])
def test_results_of_a_row_that_has_a_new_owner_are_judged(
    plain: PlainRuns,
    build_kind: Callable[[Kind], CheckEngine],
    monkeypatch: pytest.MonkeyPatch,
    returns: str,
) -> None:
    """The prompt loses its row while a step is in flight, whose results have log-probabilities."""
    params = {**PHASED.params, "prompt_logprobs": 3}
    request = replace(PHASED, params=params, preempt=(IN_PROMPT,), returns=returns, arrival=3)
    scenario = Scenario(Kind("oracle", 3, in_flight=2), Limits(chunk=64), (request, OTHER))
    play(plain, build_kind, scenario)
    prompt_logprobs = Worker._prompt_logprobs

    def by_present_owner(worker: Worker, row: LaunchedRow) -> Any:
        return prompt_logprobs(worker, replace(row, spec=worker.specs[row.row]))

    monkeypatch.setattr(Worker, "_prompt_logprobs", by_present_owner)
    difference = Examiner(plain, build_kind).examine(scenario).difference
    assert difference is not None and difference.request == 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("place", [BEFORE_STEP, AFTER_LAUNCH, AT_RESULTS])
def test_requests_go_on_after_a_step_that_raises(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine], place: str, in_flight: int
) -> None:
    limits = Limits(chunk=64, failure=place, failure_step=5, host=2, caching=True)
    requests = (replace(PHASED, preempt=(IN_ANSWER,)), OTHER)
    scenario = Scenario(Kind("oracle", 3, in_flight=in_flight), limits, requests)
    events, met = play(plain, build_kind, scenario)
    assert events[FAILED_STEPS] == 1 and ("failure", place) in met


def test_prefixes_come_from_host_memory_in_several_allocations(
    plain: PlainRuns, build_kind: Callable[[Kind], CheckEngine]
) -> None:
    filler = WarmPrefix(tuple(t % 90 for t in range(7, 7 + 4 * PAGE_SIZE - 9)))
    limits = Limits(pages=4, snapshots=1, host=16, slab_pages=3, caching=True)
    warm = (WarmPrefix(PHASED.prompt), filler)
    scenario = Scenario(Kind(), limits, (PHASED,), warm)
    events, met = play(plain, build_kind, scenario)
    assert ("prefix", "in host memory") in met and events["pages loaded from host memory"]


def test_inventory_finds_every_tensor_of_rows_and_units(
    build_kind: Callable[[Kind], CheckEngine],
) -> None:
    """The walk finds what the worker's own lists have, and needs none of them."""
    worker = worker_of(build_kind(Kind("mtp", 3)).engine)
    rows, units = rows_and_units(worker)
    pointers = {tensor.data_ptr() for tensor in (*rows, *units)}
    table = worker.table
    live = (*table.row_tensors(), table.page_table, table.state_slots, *worker.paged, *worker.state)
    assert {t.data_ptr() for t in live if t.numel()} <= pointers
    weights = {parameter.data_ptr() for parameter in worker.model.parameters()}
    assert not pointers & weights
    worker.forgotten = torch.zeros(table.page_table.shape[0], 5)  # type: ignore[attr-defined]
    tensors, _ = rows_and_units(worker)
    assert any(tensor is worker.forgotten for tensor in tensors)


def test_inventory_tells_state_slots_from_as_many_rows() -> None:
    """Slot 0 is poisoned as well, and row 0 never."""
    worker = worker_of(make_engine("mtp", num_snapshots=0).engine)
    assert worker.plan.num_slots == worker.table.page_table.shape[0]
    rows, units = rows_and_units(worker)
    slots = {tensor.data_ptr() for tensor in worker.state}
    assert slots <= {tensor.data_ptr() for tensor in units}
    assert not slots & {tensor.data_ptr() for tensor in rows}
