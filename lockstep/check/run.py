"""Entry points of the check: run the sections of a model's check, or one scenario."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.check.checked_model import CheckedModel
from lockstep.check.companions import numerics_of
from lockstep.check.deadline import TIME_UP, Deadline
from lockstep.check.judges import transformers_logits
from lockstep.check.judges.distributions import run_sampling
from lockstep.check.judges.kernels import run_kernels
from lockstep.check.matrix.logits import run_logits
from lockstep.check.matrix.setups import LOGITS, SAMPLING, SIZES, num_outputs, requested_setup
from lockstep.check.matrix.tokens import TokenMatrix, shard_engines
from lockstep.check.report.coverage import Coverage
from lockstep.check.report.report import MATRIX_CASES, SCENARIOS, Report, running
from lockstep.check.scenarios.examiner import Effort, replay, run_scenarios
from lockstep.check.scenarios.generator import ScenarioGenerator
from lockstep.check.scenarios.scenario import Scenario
from lockstep.check.sections import CACHE, CAPTURE, KERNELS, SECTIONS, TOKENS, section_of
from lockstep.errors import CapacityError, ConfigError, choice_error
from lockstep.progress import Progress, ignore_progress

NOT_SELECTED = "not selected by --sections"
STOPPED = "the check was stopped"
"""Reason against parts after an interruption, an error, or with fail_fast a difference."""
OTHER_SHARD = "the first shard has it"


@dataclass(frozen=True)
class Part:
    """Part of a section.

    name: as reports list it where it is not run. weight: share of a time limit, relative to the
    other parts. compares: it needs a second engine next to the plain one. divided: each shard runs
    a part of it; the first shard runs the whole of others. fills: it takes any time that is left.
    cases: outputs of the matrix. refused: why it cannot run here.
    """

    section: str
    name: str
    weight: int
    run: Callable[[Deadline], object]
    compares: bool = True
    divided: bool = True
    fills: bool = False
    cases: int = 0
    refused: str = ""


def run_check(
    size: str = "default",
    model: str | None = None,
    progress: Progress = ignore_progress,
    seed: int = 0,
    effort: Effort | None = None,
    sections: Sequence[str] = tuple(SECTIONS),
    seconds: float | None = None,
    **settings: Any,
) -> Report:
    """Run sections of a check of a size (quick, default, full).

    settings: the user's LLM arguments, for all engines. Scenarios and matrix vary K and
    max_num_seqs; one more engine has the user's. A speculative_config names one more drafter to
    check, "auto" none. effort: number of scenarios, treatment of differences, and the shard.
    seconds: time limit, of which each part gets a share.

    Raises ConfigError for an unknown size, what LLM raises, and Interrupted. Differences are
    reported, not raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    effort = effort or Effort.of(SIZES[size])
    report = Report(size, seed=seed, coverage=Coverage(), shard=effort.shard)
    deadline = Deadline.after(seconds)
    with running(report):
        checked = CheckedModel(model, settings, report, progress)
        parts = _selected(_parts(checked, effort), sections, report)
        report.planned[MATRIX_CASES] = sum(part.cases for part in parts)
        if seconds is not None:
            # Scenarios never run out, so they take what the other parts leave of the time.
            parts.sort(key=lambda part: part.fills)
        with checked.collector.freezing():
            with closing(checked.rank_pool):
                _run_parts(parts, checked, effort, deadline)
            # At the interpreter's exit no thread can limit the time in which NCCL ends.
            checked.collector.collect()
        progress("done", 1, 1)
    return report


def run_replay(scenario: Scenario, model: str | None = None, **settings: Any) -> Report:
    """Run the scenario of a file alone. Raises Interrupted."""
    report = Report("replay", planned={SCENARIOS: 1})
    with running(report):
        checked = CheckedModel(model, settings, report, ignore_progress)
        with closing(checked.rank_pool):
            replay(scenario, checked.examiner(), report)
    return report


def _parts(checked: CheckedModel, effort: Effort) -> list[Part]:
    """Return all parts of a check, in the order of their runs."""
    report = checked.report
    progress = checked.progress

    def oracle(deadline: Deadline) -> None:
        transformers_logits.run_oracle(checked.plain, report, progress, deadline)

    def sampling(deadline: Deadline) -> None:
        samples = SIZES[report.size].num_samples
        run_sampling(
            checked.runs, checked.build, samples, report, effort.fail_fast, progress, deadline
        )

    return [
        Part(KERNELS, "kernels", 3, partial(run_kernels, checked), compares=False, divided=False),
        Part(LOGITS, "logits of other batches", 3, partial(run_logits, checked), compares=False),
        Part(LOGITS, transformers_logits.PART, 1, oracle, compares=False, divided=False),
        Part(SAMPLING, "tests of distributions", 1, sampling, divided=False),
        Part(TOKENS, "random scenarios", 4, partial(_scenarios, checked, effort), fills=True),
        *_matrix_parts(checked, effort),
    ]


def _matrix_parts(checked: CheckedModel, effort: Effort) -> Iterator[Part]:
    """Yield the parts of the sections in the matrix."""
    size = checked.report.size
    requested = requested_setup(checked.drafting, checked.rows, checked.graphs)
    engines = shard_engines(size, checked.drafters, checked.graphs, effort.shard, requested)
    matrix = TokenMatrix(checked, effort.fail_fast)
    for section in (TOKENS, CACHE, CAPTURE):
        of_section = [engine for engine in engines if section_of(engine[1]) == section]
        run = partial(matrix.run, section, of_section)
        name = "captured CUDA graphs" if section == CAPTURE else f"matrix of {section}"
        cases = sum(num_outputs(SIZES[size], setup) for _, setup in of_section)
        refused = ""
        if not of_section:
            has_graphs = checked.device == "cuda"
            refused = "no GPU" if section == CAPTURE and not has_graphs else "this shard has none"
        yield Part(section, name, 2, run, cases=cases, refused=refused)


def _scenarios(checked: CheckedModel, effort: Effort, deadline: Deadline) -> None:
    """Run random scenarios: their number, or until the deadline."""
    report = checked.report
    size = SIZES[report.size]
    if deadline.seconds_left is not None:
        effort = replace(effort, seconds=deadline.seconds_left)
    checked.progress("scenarios: plan", 0, 0)
    generator = ScenarioGenerator(
        checked.runs,
        report.seed,
        checked.drafters,
        checked.graphs,
        strength=size.strength,
        companions=checked.is_bundled,
        numerics=numerics_of(checked.settings),
        # Engines of the companions are built in less time than a scenario takes.
        per_engine=1 if checked.is_bundled and checked.graphs == ("none",) else 2,
        num_requests=size.requests,
        twins=size.twins,
        num_ranks=checked.config.tensor_parallel_size,
    )
    num_scenarios = effort.num_scenarios(generator)
    if num_scenarios is not None:
        report.planned[SCENARIOS] = num_scenarios
    run_scenarios(generator, checked.examiner(), effort, report, checked.progress)


def _selected(parts: list[Part], sections: Sequence[str], report: Report) -> list[Part]:
    """Return the parts of these sections that this shard runs on this device.

    The report gets the others with the reason.
    """
    selected = []
    for part in parts:
        if part.section not in sections:
            report.omit(part.section, part.name, NOT_SELECTED)
        elif part.refused:
            report.omit(part.section, part.name, part.refused)
        elif not part.divided and report.shard.index > 1:
            report.omit(part.section, part.name, OTHER_SHARD)
        else:
            selected.append(part)
    return selected


def _run_parts(
    parts: list[Part], checked: CheckedModel, effort: Effort, deadline: Deadline
) -> None:
    """Run the parts, and record those that are left out."""
    report = checked.report
    done = 0
    try:
        for part in parts:
            if report.failures and effort.fail_fast:
                break
            weights = sum(later.weight for later in parts[done:])
            _run_part(part, checked, deadline.share(part.weight, weights))
            done += 1
    finally:
        for part in parts[done:]:
            report.omit(part.section, part.name, STOPPED)


def _run_part(part: Part, checked: CheckedModel, deadline: Deadline) -> None:
    """Run one part, unless the time is up or its engines do not fit into memory."""
    report = checked.report
    started = time.monotonic()
    checked.collector.collect()
    try:
        reason = TIME_UP if deadline.passed else None
        if reason is None and part.compares:
            reason = checked.why_no_second_engine()
        if reason is None:
            part.run(deadline)
        else:
            report.omit(part.section, part.name, reason)
    except CapacityError as error:
        report.omit(part.section, part.name, str(error))
    finally:
        before = report.section_seconds.get(part.section, 0.0)
        report.section_seconds[part.section] = before + time.monotonic() - started
