"""The check as a whole: the plain engine, and the sections that compare everything with it."""

from collections.abc import Callable
from typing import Any

from lockstep.check.drafters import asked_drafter, drafters_of, settings_with
from lockstep.check.draw import Drawer
from lockstep.check.exercised import Exercised
from lockstep.check.harness import CheckEngine, build, build_plain
from lockstep.check.matrix import SIZES
from lockstep.check.oracle import run_oracle
from lockstep.check.plain import PlainRuns
from lockstep.check.report import Report, running
from lockstep.check.sampling import run_sampling
from lockstep.check.tokens import run_matrix, turns
from lockstep.check.world import Kind, World
from lockstep.check.worlds import Effort, Examiner, Progress, replay, run_worlds
from lockstep.errors import ConfigError, choice_error
from lockstep.worker.executor import executor_of


def _silent(what: str, done: int, of: int) -> None:
    """No progress shown."""


def run_check(
    size: str = "default",
    model: str | None = None,
    progress: Progress = _silent,
    seed: int = 0,
    effort: Effort | None = None,
    oracle: bool = False,
    **settings: Any,
) -> Report:
    """Runs a size (quick, default, full): sampling, worlds drawn from a seed, the matrix.

    `settings` are LLM's, for all engines; a speculative_config among them names a drafter that is
    checked beside those that the checkpoint allows by itself. effort: how many worlds, and what
    becomes of a difference, and which shard of the check is done; the first has the tests of
    distributions and the oracle. oracle: whether the plain run's logits are compared with
    transformers'. Raises ConfigError on an unknown size, or where there is no oracle, and
    Interrupted. Differences are in the report, not raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    effort = effort or Effort(SIZES[size].worlds)
    report = Report(size, seed=seed, used=Exercised(), shard=effort.shard)
    with running(report):
        for section in _sections(report, model, settings, progress, effort, oracle):
            section()
            if report.failures and effort.fail_fast:
                break
        progress("done", 1, 1)
    return report


def _sections(
    report: Report,
    model: str | None,
    settings: dict[str, Any],
    progress: Progress,
    effort: Effort,
    oracle: bool,
) -> list[Callable[[], object]]:
    """What a check does, in its order, over one plain engine."""
    plain = build_plain(model, settings)
    report.numerics = plain.engine.numerics
    drafters, report.skipped = drafters_of(
        executor_of(plain.engine).checkpoint, asked_drafter(settings)
    )
    size = SIZES[report.size]
    engines = turns(report.size, drafters, plain.graphs, effort.shard)
    report.worlds_due = effort.worlds_due
    report.cases_due = len(engines) * size.answers
    runs = PlainRuns(plain)
    drawer = Drawer(runs, report.seed, drafters, plain.graphs)
    examiner = _examiner(runs, model, settings, report)
    sections: list[Callable[[], object]] = [
        lambda: run_worlds(drawer, examiner, effort, report, progress),
        lambda: run_matrix(plain, engines, report, model, settings, progress, effort),
    ]
    if effort.shard.index == 1:
        sections.insert(
            0, lambda: run_sampling(runs, examiner.build, size.draws, report, effort.fail_fast)
        )
        if oracle:
            sections.insert(0, lambda: run_oracle(plain, report))
    return sections


def run_replay(world: World, model: str | None = None, **settings: Any) -> Report:
    """Runs one world of a file alone. Raises Interrupted."""
    report = Report("replay", worlds_due=1)
    with running(report):
        plain = build_plain(model, settings)
        report.numerics = plain.engine.numerics
        replay(world, _examiner(PlainRuns(plain), model, settings, report), report)
    return report


def _examiner(
    runs: PlainRuns, model: str | None, settings: dict[str, Any], report: Report
) -> Examiner:
    def build_kind(kind: Kind) -> CheckEngine:
        engine = build(model, settings_with(kind.settings(), settings), kind.hooks())
        if report.used is not None:
            report.used.engine(engine.engine, kind.drafter)
        return engine

    return Examiner(runs, build_kind)
