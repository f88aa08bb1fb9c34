"""Token matrix: every output of every engine must equal the plain run's, bit for bit."""

import gc
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from lockstep.answer import Answer
from lockstep.check.drafters import settings_with
from lockstep.check.engines import CheckEngine, Comparison, build
from lockstep.check.judges.answers import CACHED, DRAFTED, PREEMPTIONS, count_events
from lockstep.check.judges.trace import compare, traced
from lockstep.check.matrix.cases import Batch, Case, cyclic_slice, make_cases, prefixes_to_cache
from lockstep.check.matrix.setups import BATCHES, PREEMPTED, PREFIX_HIT, SIZES, Setup, Size, setups
from lockstep.check.report.progress import Progress
from lockstep.check.report.report import Failure, Report, Tally
from lockstep.check.scenarios.examiner import Effort
from lockstep.check.shard import Shard
from lockstep.scheduling.schedule import RowSpec

REQUIRED_EVENT_OF_PHASE = {PREFIX_HIT: CACHED, PREEMPTED: PREEMPTIONS}
"""Counter that must not be zero in a phase."""


def shard_engines(
    size: str, drafters: tuple[str, ...], graphs: tuple[str, ...], shard: Shard
) -> list[tuple[int, Setup]]:
    """Return the shard's engines of a size, each with its number among all engines."""
    every = enumerate(setups(size, drafters, graphs))
    return [(engine_index, setup) for engine_index, setup in every if shard.has(engine_index)]


def run_matrix(
    plain: CheckEngine,
    engines: list[tuple[int, Setup]],
    report: Report,
    model: str | None,
    settings: dict[str, Any],
    progress: Progress,
    effort: Effort,
) -> None:
    """Run engines of the matrix, and add the results to the report."""
    size = SIZES[report.size]
    cases = make_cases(plain.llm, size.max_tokens)
    expected = {case.name: plain.answers([case])[0] for case in cases}
    comparison = Comparison(expected, report, Answer.first_difference)
    num_failures = len(report.failures)
    for done, (engine_index, setup) in enumerate(engines):
        progress(f"matrix: {setup.drafting}, {setup.phase}", done, len(engines))
        _run_engine(setup, batches(cases, size, engine_index), comparison, model, settings)
        # An engine's objects refer to each other: only a collection frees its memory for the next.
        gc.collect()
        if effort.fail_fast and len(report.failures) > num_failures:
            return
    if len(report.failures) > num_failures:
        search = _Search(plain, cases, size, model, settings)
        report.failures[num_failures] = search.locate(report.failures[num_failures])


def batches(cases: list[Case], size: Size, engine_index: int) -> list[Batch]:
    """Return the batches of an engine: single cases, the seven short ones, and the long one.

    `engine_index` selects the single cases and the short cases in the batch of the long one.
    """
    *short, long = cases
    companions = cyclic_slice(short, size.companions, engine_index)
    middle = (size.companions + 1) // 2
    return [
        *(Batch(BATCHES[0], (case,)) for case in cyclic_slice(cases, size.alone, engine_index)),
        Batch(BATCHES[1], tuple(short)),
        Batch(BATCHES[2], (*companions[:middle], long, *companions[middle:])),
    ]


def _run_engine(
    setup: Setup,
    runs: list[Batch],
    comparison: Comparison,
    model: str | None,
    settings: dict[str, Any],
) -> None:
    """Build an engine, run its batches and compare; the report is updated even if interrupted."""
    started = time.monotonic()
    report = comparison.report
    num_failures = len(report.failures)
    done = comparison.compared
    try:
        engine = build(model, settings_with(setup.settings(), settings), setup.hooks())
        _record_coverage(report, engine, setup, runs)
        _run_batches(engine, setup, runs, comparison)
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
    engine: CheckEngine, setup: Setup, runs: list[Batch], comparison: Comparison
) -> None:
    """Run every batch of an engine."""
    if setup.phase == PREFIX_HIT:
        engine.cache(prefixes_to_cache(tuple(case for batch in runs for case in batch.cases)))
    answers = [answer for batch in runs for answer in comparison.run(engine, setup, batch)]
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

    plain: CheckEngine
    cases: list[Case]
    size: Size
    model: str | None
    settings: dict[str, Any]

    def locate(self, failure: Failure) -> Failure:
        """Trace the failure in an eager run, and add the first layer that differs."""
        if failure.position is None:
            return failure
        case = next(candidate for candidate in self.cases if candidate.name == failure.request)

        def is_mine(row: RowSpec) -> bool:
            return tuple(row.prompt_token_ids) == case.prompt

        # A replayed graph calls no modules, so only an eager run can be traced.
        suspect = replace(failure.setup, graph="none")
        with traced(self.plain, is_mine) as plain_digests:
            self.plain.answers([case])
        search_settings = settings_with(suspect.settings(), self.settings)
        engine = build(self.model, search_settings, suspect.hooks())
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
            for batch in batches(self.cases, self.size, engine_index):
                if batch.name == failure.batch and case in batch.cases:
                    return batch.cases
        return (case,)
