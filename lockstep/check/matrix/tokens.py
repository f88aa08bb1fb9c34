"""Token matrix: every output of every engine must equal the plain run's, bit for bit."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import cycle, islice

from lockstep.answer import Answer
from lockstep.check.checked_model import CheckedModel
from lockstep.check.deadline import NO_DEADLINE, TIME_UP, Deadline
from lockstep.check.drafters import settings_with
from lockstep.check.engines import CheckEngine, Comparison
from lockstep.check.events import CACHED, DRAFTED, PREEMPTIONS, count_events
from lockstep.check.judges.trace import compare, traced
from lockstep.check.matrix.cases import Batch, Case, cyclic_slice, make_cases, prefixes_to_cache
from lockstep.check.matrix.setups import (
    BATCHES,
    PREEMPTED,
    PREFIX_HIT,
    ROWS,
    SIZES,
    Setup,
    Size,
    setups,
)
from lockstep.check.report.report import Failure, Report, Tally
from lockstep.check.shard import Shard
from lockstep.scheduling.schedule import RowSpec

REQUIRED_EVENT_OF_PHASE = {PREFIX_HIT: CACHED, PREEMPTED: PREEMPTIONS}
"""Counter that must not be zero in a phase."""


def shard_engines(
    size: str,
    drafters: tuple[str, ...],
    graphs: tuple[str, ...],
    shard: Shard,
    requested: Setup | None = None,
) -> list[tuple[int, Setup]]:
    """Return the shard's engines of a size, each with its number among all engines.

    requested: engine with the user's settings, the last one.
    """
    every = setups(size, drafters, graphs)
    if requested is not None and requested not in every:
        every.append(requested)
    return [(index, setup) for index, setup in enumerate(every) if shard.has(index)]


class TokenMatrix:
    """Matrix of a check, whose sections share the plain outputs. fail_fast: stop at a failure."""

    def __init__(self, checked: CheckedModel, fail_fast: bool = False) -> None:
        self.checked = checked
        self.report = checked.report
        self.fail_fast = fail_fast

    @cached_property
    def cases(self) -> list[Case]:
        """Requests of every engine."""
        return make_cases(self.checked.plain.llm, SIZES[self.report.size].max_tokens)

    @cached_property
    def comparison(self) -> Comparison:
        """Comparison with the plain outputs, each of which is run when it is needed."""
        return Comparison(cache(self._plain_output), self.report, Answer.first_difference)

    def _plain_output(self, case: Case) -> Answer:
        return self.checked.plain.answers([case])[0]

    def run(
        self, section: str, engines: list[tuple[int, Setup]], deadline: Deadline = NO_DEADLINE
    ) -> None:
        """Run a section's engines, and add the results to the report.

        engines: each with its number among all engines of the matrix.
        """
        report = self.report
        size = SIZES[report.size]
        checked = self.checked
        checked.progress(f"{section}: requests", 0, len(engines))
        comparison = self.comparison
        num_failures = len(report.failures)
        compared = comparison.compared
        runs = [(setup, batches(self.cases, size, index, setup.rows)) for index, setup in engines]
        for done, (setup, engine_batches) in enumerate(runs):
            if done and deadline.passed:
                break
            checked.progress(f"{section}: {setup.drafting}, {setup.phase}", done, len(engines))
            _run_engine(setup, engine_batches, comparison, checked, deadline)
            checked.collector.collect()
            if self.fail_fast and len(report.failures) > num_failures:
                break
        total = sum(len(batch.cases) for _, engine_batches in runs for batch in engine_batches)
        missing = total - (comparison.compared - compared)
        if deadline.passed and missing > 0:
            report.omit(section, f"{missing} of {total} outputs of {section}", TIME_UP)
        if len(report.failures) > num_failures:
            search = _Search(checked, self.cases, size)
            report.failures[num_failures] = search.locate(report.failures[num_failures])


def batches(cases: list[Case], size: Size, engine_index: int, rows: int = ROWS) -> list[Batch]:
    """Return the batches of an engine: single cases, the seven short ones, and the long one.

    `engine_index` selects the single cases and the short cases in the batch of the long one.
    rows: an engine with more rows than cases has a batch that fills them.
    """
    *short, long = cases
    companions = cyclic_slice(short, size.companions, engine_index)
    middle = (size.companions + 1) // 2
    full = [Batch(f"batch of {rows}", tuple(islice(cycle(short), rows)))] if rows > ROWS else []
    return [
        *(Batch(BATCHES[0], (case,)) for case in cyclic_slice(cases, size.alone, engine_index)),
        Batch(BATCHES[1], tuple(short)),
        Batch(BATCHES[2], (*companions[:middle], long, *companions[middle:])),
        *full,
    ]


def _run_engine(
    setup: Setup,
    runs: list[Batch],
    comparison: Comparison,
    checked: CheckedModel,
    deadline: Deadline,
) -> None:
    """Build an engine, run its batches and compare; the report is updated even if interrupted."""
    started = time.monotonic()
    report = comparison.report
    num_failures = len(report.failures)
    done = comparison.compared
    try:
        settings = settings_with(setup.settings(), checked.settings)
        engine = checked.build_served(settings, setup.hooks())
        _record_coverage(report, engine, setup, runs)
        _run_batches(engine, setup, runs, comparison, deadline)
    except Exception as error:  # an engine that breaks has not given the plain answer
        report.fail(setup, "all", f"raised {type(error).__name__}: {error}")
    finally:
        failed = len(report.failures) - num_failures
        # An engine that raised compared nothing, but its failure is one case.
        cases = max(comparison.compared - done, failed)
        if cases:
            report.add(Tally(setup, cases, failed, round(time.monotonic() - started, 2)))


def _record_coverage(report: Report, engine: CheckEngine, setup: Setup, runs: list[Batch]) -> None:
    """Record the engine and the parameters of its requests as exercised."""
    if report.coverage is None:
        return
    report.coverage.record_engine(engine.engine, setup.drafter)
    for batch in runs:
        for case in batch.cases:
            report.coverage.record_params(case.params)


def _run_batches(
    engine: CheckEngine,
    setup: Setup,
    runs: list[Batch],
    comparison: Comparison,
    deadline: Deadline,
) -> None:
    """Run the first batch of an engine, and those that begin in time."""
    if setup.phase == PREFIX_HIT:
        engine.cache(prefixes_to_cache(tuple(case for batch in runs for case in batch.cases)))
    answers: list[Answer] = []
    for batch in runs:
        answers += comparison.run(engine, setup, batch)
        if deadline.passed and batch is not runs[-1]:
            # The events that a phase requires may be those of the batches that are left.
            return
    for name in _missing_events(setup, count_events(answers)):
        comparison.report.fail(setup, "all", f"the run had no {name}")


def _missing_events(setup: Setup, events: Counter[str]) -> list[str]:
    """Return the required events that did not occur."""
    required = (
        [REQUIRED_EVENT_OF_PHASE[setup.phase]] if setup.phase in REQUIRED_EVENT_OF_PHASE else []
    )
    if setup.k:
        required.append(DRAFTED)
    return [name for name in required if not events[name]]


@dataclass(frozen=True)
class _Search:
    """Search for the first layer at which a failing case differs."""

    checked: CheckedModel
    cases: list[Case]
    size: Size

    def locate(self, failure: Failure) -> Failure:
        """Trace the failure in an eager run, and add the first layer that differs."""
        if failure.position is None:
            return failure
        case = next(candidate for candidate in self.cases if candidate.name == failure.request)

        def is_mine(row: RowSpec) -> bool:
            return tuple(row.prompt_token_ids) == case.prompt

        # A replayed graph calls no modules, so only an eager run can be traced.
        suspect = replace(failure.setup, graph="none")
        checked = self.checked
        plain = checked.plain
        with traced(plain, is_mine) as plain_digests:
            plain.answers([case])
        search_settings = settings_with(suspect.settings(), checked.settings)
        engine = checked.build_served(search_settings, suspect.hooks())
        if suspect.phase == PREFIX_HIT:
            engine.cache(prefixes_to_cache(tuple(self.cases)))
        with traced(engine, is_mine) as traced_digests:
            engine.answers(self._batch_cases(failure, case))
        where = compare(plain_digests, traced_digests, len(case.prompt) + failure.position)
        if where is None:
            where = (
                "no module of the model differs in an eager run: look at the sampler or the graph"
            )
        return replace(failure, where=where)

    def _batch_cases(self, failure: Failure, case: Case) -> tuple[Case, ...]:
        """Return the cases of the failure's batch, by trying the batches of all engines."""
        for engine_index in range(len(self.cases)):
            for batch in batches(self.cases, self.size, engine_index, failure.setup.rows):
                if batch.name == failure.batch and case in batch.cases:
                    return batch.cases
        return (case,)
