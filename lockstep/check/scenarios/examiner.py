"""Run random scenarios, compare them with plain runs, and shrink the first that differs."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.answer import Answer
from lockstep.check.collector import Collector
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.engines import CheckEngine
from lockstep.check.events import ACCEPTED, CACHED, DRAFTED, FORCED, JOINT_STEPS, PREEMPTIONS
from lockstep.check.judges.plain_runs import SERVED, PlainRuns
from lockstep.check.judges.trace import compare, traced
from lockstep.check.matrix.setups import SCENARIO, Setup, Size
from lockstep.check.report.coverage import Coverage
from lockstep.check.report.report import Failure, Report, Tally
from lockstep.check.scenarios.driver import FAILED_STEPS, OTHER_ROWS, REUSED_IDS
from lockstep.check.scenarios.features import Event
from lockstep.check.scenarios.generator import GeneratedScenario, ScenarioGenerator, met_values
from lockstep.check.scenarios.met_tuples import MetTuples
from lockstep.check.scenarios.runner import ScenarioRunner
from lockstep.check.scenarios.scenario import Kind, Scenario, write_scenario
from lockstep.check.scenarios.shrink import minimise
from lockstep.check.shard import WHOLE, Shard
from lockstep.errors import LockstepError
from lockstep.progress import Progress
from lockstep.spec import prediction

Build = Callable[[Kind], CheckEngine]
HOST_LOADS = "pages loaded from host memory"
REQUIRED_EVENTS = (
    *(CACHED, PREEMPTIONS, DRAFTED, ACCEPTED, FORCED),
    *(HOST_LOADS, FAILED_STEPS, OTHER_ROWS, REUSED_IDS),
)
"""Counters that must not be zero over all scenarios of a check that meets every pair."""
MIN_SCENARIOS = 20
"""Scenarios of a check from which on the required events must occur."""
MAX_REPAIRS = 6
"""Maximum scenarios that are added for tuples that were planned and did not occur."""


@dataclass(frozen=True)
class Difference:
    """Difference between a scenario and its plain runs.

    request, completion: indices of the output; request is None if the engine raised. position:
    index of the output token. plain: the plain run itself is wrong. refused: Lockstep raised one of
    its own errors.
    """

    request: int | None
    completion: int
    position: int | None
    what: str
    plain: bool = False
    refused: bool = False


@dataclass
class Examination:
    """Result of comparing one scenario: difference, number of outputs and event counters.

    met: per request, the features that depend on the run and that it really had. refusal: why its
    engine cannot be built here.
    """

    difference: Difference | None
    answers: int
    events: Counter[str]
    met: list[set[Event]] = field(default_factory=list)
    refusal: str = ""


class Examiner:
    """Comparison of scenarios with plain runs. It caches the engine of the last kind.

    collector: frees that engine before the next one is built.
    """

    def __init__(self, plain: PlainRuns, build: Build, collector: Collector | None = None) -> None:
        self.plain = plain
        self.build = build
        self.collector = collector or Collector()
        self._runner: ScenarioRunner | None = None

    def runner(self, kind: Kind) -> ScenarioRunner:
        """Return a runner with an engine of this kind."""
        if self._runner is None or self._runner.kind != kind:
            self._runner = None
            self.collector.collect()
            self._runner = ScenarioRunner(self.build(kind), kind)
        return self._runner

    def examine(self, scenario: Scenario) -> Examination:
        """Run a scenario and compare its outputs. An exception counts as a difference."""
        if scenario.kind.model != SERVED:
            try:
                self.plain.for_kind(scenario.kind)
                self.runner(scenario.kind)
            except LockstepError as error:
                # A companion may not suit the device or the user's settings.
                return Examination(None, 0, Counter(), refusal=str(error))
            except Exception as error:
                what = f"building the engine raised {type(error).__name__}: {error}"
                return Examination(Difference(None, 0, None, what), 1, Counter())
        plain_difference = self._wrong_plain(scenario)
        if plain_difference is not None:
            return Examination(plain_difference, 1, Counter())
        try:
            result = self.runner(scenario.kind).play(scenario, self.plain)
        except Exception as error:  # an engine that breaks has not given the plain answer
            # The engine's state is undefined now: the next scenario gets a new engine.
            self._runner = None
            what = f"raised {type(error).__name__}: {error}"
            refused = isinstance(error, LockstepError)
            return Examination(Difference(None, 0, None, what, refused=refused), 1, Counter())
        fault = result.fault if result.violation is None else result.violation
        if fault is not None:
            self._runner = None
        count = len(result.answers)
        for outcome in result.answers:
            expected = self._expected(scenario, outcome.request)[outcome.completion]
            mismatch = outcome.answer.first_difference(expected, outcome.aborted)
            if mismatch is not None:
                position, what = mismatch
                if result.violation is not None:
                    what += f"; then the run raised InvariantError: {result.violation}"
                difference = Difference(outcome.request, outcome.completion, position, what)
                return Examination(difference, count, result.events)
        if fault is not None:
            difference = Difference(None, 0, None, f"raised InvariantError: {fault}")
            return Examination(difference, count, result.events)
        return Examination(None, count, result.events, result.met)

    def _expected(self, scenario: Scenario, index: int) -> list[Answer]:
        """Return the plain outputs of a request."""
        request = scenario.requests[index]
        runs = self.plain.for_kind(scenario.kind).of(request.adapter)
        return runs.answers(request.prompt, scenario.plain_params(request), request.conversation)

    def differs(self, scenario: Scenario, plain: bool) -> bool:
        """Return whether the scenario differs; a scenario that Lockstep refuses does not count.

        plain: the plain run itself must be wrong, else another run must differ from it.
        """
        difference = self.examine(scenario).difference
        return difference is not None and not difference.refused and difference.plain == plain

    def _wrong_plain(self, scenario: Scenario) -> Difference | None:
        for index, request in enumerate(scenario.requests):
            try:
                runs = self.plain.for_kind(scenario.kind).of(request.adapter)
                fault = runs.fault_of(
                    request.prompt, scenario.plain_params(request), request.conversation
                )
            except Exception as error:
                what = f"the plain run raised {type(error).__name__}: {error}"
                refused = isinstance(error, LockstepError)
                return Difference(index, 0, None, what, plain=True, refused=refused)
            if fault is not None:
                what = f"the plain run itself: {fault.what}"
                return Difference(index, fault.completion, fault.position, what, plain=True)
        return None


@dataclass(frozen=True)
class Effort:
    """Extent of a check.

    scenarios: number of scenarios over all shards. has_values: more of them until every value of a
    feature was planned. covers: more of them until every pair or triple was planned, and again
    where a planned one did not occur. seconds: time limit that replaces the number. minimise:
    seconds for shrinking the first scenario that differs. folder: directory for its file, or None.
    fail_fast: stop at the first difference. shard: part of the check to run.
    """

    scenarios: int
    seconds: float | None = None
    minimise: float = 60.0
    folder: Path | None = None
    fail_fast: bool = False
    shard: Shard = WHOLE
    covers: bool = False
    has_values: bool = False

    @classmethod
    def of(cls, size: Size, **options: Any) -> "Effort":
        """Return the effort of a size; one without scenarios has none. options: other fields."""
        has_values = size.scenarios > 0
        return cls(size.scenarios, covers=size.covers, has_values=has_values, **options)

    def total(self, generator: ScenarioGenerator) -> int:
        """Return the number of scenarios over all shards."""
        if self.covers:
            return max(self.scenarios, generator.plan.num_scenarios)
        if self.has_values:
            return max(self.scenarios, generator.plan.num_for_values)
        return self.scenarios

    def num_scenarios(self, generator: ScenarioGenerator) -> int | None:
        """Return the number of scenarios of the shard; None if a time limit decides."""
        if self.seconds is not None:
            return None
        indices = range(self.total(generator))
        return sum(self.shard.has(index // generator.per_engine) for index in indices)

    def is_over(self, index: int, elapsed: float, total: int) -> bool:
        """Return whether to stop before scenario `index`, after this number of seconds."""
        if self.seconds is not None:
            return elapsed >= self.seconds
        return index >= total


def run_scenarios(
    generator: ScenarioGenerator,
    examiner: Examiner,
    effort: Effort,
    report: Report,
    progress: Progress,
) -> None:
    """Generate and run scenarios, and add the results to the report."""
    started = time.monotonic()
    total = 0 if effort.seconds is not None else effort.total(generator)
    met = MetTuples(generator.plan)
    report.tuples = met
    run = _ScenarioRun(generator, examiner, effort, report, met)
    for index in count():
        if effort.is_over(index, time.monotonic() - started, total):
            break
        # Scenarios of a kind share an engine, so they belong to the same shard.
        if not effort.shard.has(index // generator.per_engine):
            continue
        progress(f"scenario {index}", index, total)
        if not run.run(index):
            return
    if effort.covers and effort.seconds is None:
        generator.plan.plan_again(met.missed)
        for index in range(total, total + MAX_REPAIRS):
            if not met.missed.any():
                break
            progress(f"scenario {index}", index, total + MAX_REPAIRS)
            if not run.run(index):
                return
    if sum(tally.setup.phase == SCENARIO for tally in report.tallies) >= MIN_SCENARIOS:
        joins_always = examiner.plain.engine.engine.plan.device == "cpu"
        _check_exercised(report, (*REQUIRED_EVENTS, *(JOINT_STEPS,) * joins_always))


@dataclass
class _ScenarioRun:
    """Run of numbered scenarios, whose results go to a report. met: the tuples of values so far."""

    generator: ScenarioGenerator
    examiner: Examiner
    effort: Effort
    report: Report
    met: MetTuples

    def run(self, index: int) -> bool:
        """Generate and run one scenario; return False if the check must stop."""
        report = self.report
        started = time.monotonic()
        name = f"scenario {index} of seed {self.generator.seed}"
        try:
            generated = self._generated(index)
        except Exception as error:  # the generator runs the plain engine, which may raise anything
            what = f"the plain run raised {type(error).__name__}: {error}"
            report.fail(Setup(NO_DRAFTER, 0, SCENARIO, "none"), name, what, "a plain run")
            return False
        if generated is None:
            return True
        scenario = generated.scenario
        result = self.examiner.examine(scenario)
        if result.refusal:
            self._refuse(index, result.refusal)
            return True
        if report.coverage is not None:
            _record_params(report.coverage, scenario)
            report.coverage.has_joint_steps |= result.events[JOINT_STEPS] > 0
        seconds = round(time.monotonic() - started, 2)
        failed = int(result.difference is not None)
        report.add(Tally(setup_of(scenario), result.answers, failed, seconds, f"scenario {index}"))
        report.count(result.events)
        self.met.plan(self.generator.plan.scenario(index).rows())
        for values, events in zip(generated.values, result.met, strict=False):
            self.met.add(met_values(values, events))
        if result.difference is not None:
            first = not any(f.setup.phase == SCENARIO for f in report.failures)
            file = f"lockstep-check-{self.generator.seed}-{index}.json" if first else None
            difference = result.difference
            _add_difference(report, scenario, difference, self.examiner, self.effort, name, file)
        return not (failed and self.effort.fail_fast)

    def _generated(self, index: int) -> GeneratedScenario | None:
        """Return a generated scenario, None if its companion cannot be built."""
        if self.generator.kind(index).model == SERVED:
            return self.generator.generate(index)
        try:
            return self.generator.generate(index)
        except LockstepError as error:
            self._refuse(index, str(error))
            return None

    def _refuse(self, index: int, why: str) -> None:
        """Record that the engine of a scenario with a companion cannot be built."""
        kind = self.generator.kind(index)
        companion = f"companion {kind.model}, {kind.numerics}, drafter {kind.drafter}"
        self.report.refused[companion] = why


def _record_params(coverage: Coverage, scenario: Scenario) -> None:
    """Record the sampling parameters of a scenario's requests."""
    for request in scenario.requests:
        coverage.record_params(request.sampling())
        if request.forced:
            coverage.parameters.add("forced_token_ids")
    if scenario.kind.drafter == prediction.METHOD:
        coverage.parameters.add("prediction")


def _add_difference(
    report: Report,
    scenario: Scenario,
    difference: Difference,
    examiner: Examiner,
    effort: Effort,
    name: str,
    file: str | None,
) -> None:
    """Add a failure at once; if a file is named, replace it by the shrunk one, which takes long."""
    without_shrinking = replace(effort, minimise=0.0)
    report.failures.append(explain(scenario, difference, examiner, without_shrinking, name, file))
    if file is not None and effort.minimise > 0:
        report.failures[-1] = explain(scenario, difference, examiner, effort, name, file)


def _check_exercised(report: Report, required: tuple[str, ...]) -> None:
    """Report a failure for each required event that never occurred."""
    for name in required:
        if not report.exercised.get(name):
            report.fail(Setup(NO_DRAFTER, 0, SCENARIO, "none"), "all", f"no scenario had {name}")


def setup_of(scenario: Scenario) -> Setup:
    """Return the scenario's engine as the report's Setup."""
    kind = scenario.kind
    return Setup(kind.drafter, kind.drafts, SCENARIO, kind.graph, kind.changing)


def explain(
    scenario: Scenario,
    difference: Difference,
    examiner: Examiner,
    effort: Effort,
    name: str,
    file: str | None,
) -> Failure:
    """Return the failure of a scenario.

    file: if not None, shrink the scenario, write it to this file and trace the difference.
    """
    where = None
    if file is not None and effort.minimise > 0:
        # A smaller request may have a fault of its plain run, which is another fault.
        differs = partial(examiner.differs, plain=difference.plain)
        scenario = minimise(scenario, differs, effort.minimise)
        difference = examiner.examine(scenario).difference or difference
        where = locate(scenario, difference, examiner)
    written = None
    if file is not None and effort.folder is not None:
        path = effort.folder / file
        write_scenario(path, scenario, what=difference.what, found=name)
        written = str(path)
    label = "every request"
    sampling = "all"
    if difference.request is not None:
        request = scenario.requests[difference.request]
        label = f"request {difference.request + 1} of {len(scenario.requests)}"
        label += f", a prompt of {len(request.prompt)} tokens"
        sampling = ", ".join(request.params)
    return Failure(
        setup_of(scenario), name, label, sampling, difference.position, difference.what, where,
        written,
    )  # fmt: skip


def locate(scenario: Scenario, difference: Difference, examiner: Examiner) -> str | None:
    """Run the scenario again with tracing, and name the first layer and op that differ."""
    if difference.request is None or difference.position is None or difference.plain:
        return None
    request = scenario.requests[difference.request]
    suffix = f"-{difference.completion}" if request.params.get("n", 1) > 1 else ""
    traced_id = f"r{difference.request}{suffix}"
    plain_id = f"plain-1{suffix}"
    end = len(request.prompt) + difference.position
    eager = replace(scenario, kind=replace(scenario.kind, graph="none"))
    # New plain runs: the cached ones would not run again, and their first id is plain-1.
    plain = examiner.plain.for_kind(scenario.kind).of(request.adapter).without_outputs()
    with traced(plain.engine, lambda row: row.id == plain_id) as plain_digests:
        plain.answers(request.prompt, scenario.plain_params(request), request.conversation)
    try:
        runner = examiner.runner(eager.kind)
        with traced(runner.engine, lambda row: row.id == traced_id) as digests:
            runner.play(eager, examiner.plain)
    except Exception as error:
        return f"the traced run raised {type(error).__name__}: {error}"
    module = compare(plain_digests, digests, end)
    return module or "no module of the model differs in an eager run: look at the sampler"


def replay(scenario: Scenario, examiner: Examiner, report: Report) -> None:
    """Run one scenario of a file, and add the result to the report."""
    result = examiner.examine(scenario)
    failed = int(result.difference is not None)
    report.add(Tally(setup_of(scenario), result.answers, failed, 0.0, "replayed scenario"))
    report.exercised = dict(result.events)
    if result.difference is not None:
        effort = Effort(scenarios=1, minimise=0.0)
        failure = explain(scenario, result.difference, examiner, effort, "replayed scenario", None)
        report.failures.append(failure)
        where = locate(scenario, result.difference, examiner)
        report.failures[-1] = replace(failure, where=where)
