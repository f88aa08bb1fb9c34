"""The token matrix: every answer of every engine must equal the plain run's, bit for bit."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check.answers import Answer, took_place
from lockstep.check.cases import Batch, Case, beginnings, in_turn, make_cases
from lockstep.check.drafters import settings_with
from lockstep.check.harness import CheckEngine, Comparison, build
from lockstep.check.matrix import BATCHES, PREEMPTED, PREFIX_HIT, SIZES, Setup, Size, setups
from lockstep.check.report import Failure, Report, Tally
from lockstep.check.shard import Shard
from lockstep.check.trace import compare, traced
from lockstep.check.worlds import Effort
from lockstep.scheduling.schedule import RowSpec

Progress = Callable[[str, int, int], None]
PHASE_AXES = {PREFIX_HIT: "cached tokens", PREEMPTED: "preemptions"}
"""What has to take place in a phase."""


def turns(
    size: str, drafters: tuple[str, ...], graphs: tuple[str, ...], shard: Shard
) -> list[tuple[int, Setup]]:
    """The shard's engines of a size's matrix, each behind its turn among all."""
    every = enumerate(setups(size, drafters, graphs))
    return [(turn, setup) for turn, setup in every if shard.has(turn)]


def run_matrix(
    plain: CheckEngine,
    engines: list[tuple[int, Setup]],
    report: Report,
    model: str | None,
    settings: dict[str, Any],
    progress: Progress,
    effort: Effort,
) -> None:
    """Runs engines of the matrix of the report's size, and adds to the report."""
    size = SIZES[report.size]
    cases = make_cases(plain.llm, size.max_tokens)
    expected = {case.name: plain.answers([case])[0] for case in cases}
    comparison = Comparison(expected, report, Answer.first_difference)
    before = len(report.failures)
    for done, (turn, setup) in enumerate(engines):
        progress(f"{setup.drafting}, {setup.phase}", done, len(engines))
        _run_engine(setup, batches(cases, size, turn), comparison, model, settings)
        gc.collect()
        if effort.fail_fast and len(report.failures) > before:
            return
    if len(report.failures) > before:
        search = _Search(plain, cases, size, model, settings)
        report.failures[before] = search.located(report.failures[before])


def batches(cases: list[Case], size: Size, turn: int) -> list[Batch]:
    """Who runs together on the `turn`th engine: some alone, the seven, and the long one amid some.

    The cases that run alone, and the long one's company, move on from engine to engine.
    """
    *short, long = cases
    company = in_turn(short, size.company, turn)
    half = (size.company + 1) // 2
    return [
        *(Batch(BATCHES[0], (case,)) for case in in_turn(cases, size.alone, turn)),
        Batch(BATCHES[1], tuple(short)),
        Batch(BATCHES[2], (*company[:half], long, *company[half:])),
    ]


def _run_engine(
    setup: Setup,
    runs: list[Batch],
    comparison: Comparison,
    model: str | None,
    settings: dict[str, Any],
) -> None:
    """Builds an engine, runs everything, compares, and adds to the report, interrupted or not."""
    started = time.monotonic()
    report = comparison.report
    before = len(report.failures)
    done = comparison.compared
    try:
        engine = build(model, settings_with(setup.settings(), settings), setup.hooks())
        _note_used(report, engine, setup, runs)
        _run_batches(engine, setup, runs, comparison)
    except Exception as error:  # an engine that breaks has not given the plain answer
        report.fail(setup, "all", f"raised {type(error).__name__}: {error}")
    finally:
        failed = len(report.failures) - before
        cases = max(comparison.compared - done, failed)
        if cases:
            report.add(Tally(setup, cases, failed, round(time.monotonic() - started, 2)))


def _note_used(report: Report, engine: CheckEngine, setup: Setup, runs: list[Batch]) -> None:
    """Adds the engine and the parameters of its requests to what the report was run with."""
    if report.used is None:
        return
    report.used.engine(engine.engine, setup.drafter)
    for batch in runs:
        for case in batch.cases:
            report.used.params(case.params)


def _run_batches(
    engine: CheckEngine, setup: Setup, runs: list[Batch], comparison: Comparison
) -> None:
    """Every batch of an engine."""
    if setup.phase == PREFIX_HIT:
        engine.cache(beginnings(tuple(case for batch in runs for case in batch.cases)))
    answers = [answer for batch in runs for answer in comparison.run(engine, setup, batch)]
    for name in _missing(setup, took_place(answers)):
        comparison.report.fail(setup, "all", f"no {name} at all")


def _missing(setup: Setup, seen: Counter[str]) -> list[str]:
    """The axes that were to take place and never did: a run without them proves nothing."""
    wanted = [PHASE_AXES[setup.phase]] if setup.phase in PHASE_AXES else []
    if setup.k:
        wanted.append("drafted")
    return [name for name in wanted if not seen[name]]


@dataclass(frozen=True)
class _Search:
    """Looks for the layer at which a failure of the matrix begins."""

    plain: CheckEngine
    cases: list[Case]
    size: Size
    model: str | None
    settings: dict[str, Any]

    def located(self, failure: Failure) -> Failure:
        """The failure with the first layer and op that differ, found by running it again, traced
        and without graphs."""
        if failure.position is None:
            return failure
        case = next(c for c in self.cases if c.name == failure.request)

        def is_mine(row: RowSpec) -> bool:
            return tuple(row.prompt_token_ids) == case.prompt

        suspect = replace(failure.setup, graph="none")
        with traced(self.plain, is_mine) as due:
            self.plain.answers([case])
        own = settings_with(suspect.settings(), self.settings)
        engine = build(self.model, own, suspect.hooks())
        if suspect.phase == PREFIX_HIT:
            engine.cache(beginnings(tuple(self.cases)))
        with traced(engine, is_mine) as found:
            engine.answers(self._company(failure, case))
        where = compare(due, found, len(case.prompt) + failure.position)
        if where is None:
            where = (
                "no module of the model differs when run eagerly: look at the sampler or the graph"
            )
        return replace(failure, where=where)

    def _company(self, failure: Failure, case: Case) -> tuple[Case, ...]:
        """The batch of that name that holds the case: whichever engine's turn it was."""
        for turn in range(len(self.cases)):
            for batch in batches(self.cases, self.size, turn):
                if batch.name == failure.batch and case in batch.cases:
                    return batch.cases
        return (case,)
