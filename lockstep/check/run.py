"""Entry points of the check: build the plain engine, and run all sections against it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.check.companions import Companions, numerics_of
from lockstep.check.drafters import drafters_of, requested_drafter, settings_with
from lockstep.check.engines import CheckEngine, build, build_plain
from lockstep.check.judges.distributions import run_sampling
from lockstep.check.judges.plain_runs import SERVED, PlainRuns
from lockstep.check.judges.transformers_logits import run_oracle
from lockstep.check.matrix.setups import SIZES
from lockstep.check.matrix.tokens import run_matrix, shard_engines
from lockstep.check.random_adapters import RandomAdapters
from lockstep.check.report.coverage import Coverage
from lockstep.check.report.progress import Progress, no_progress
from lockstep.check.report.report import Report, running
from lockstep.check.scenarios.examiner import Effort, Examiner, replay, run_scenarios
from lockstep.check.scenarios.generator import ScenarioGenerator
from lockstep.check.scenarios.scenario import Kind, Scenario
from lockstep.errors import ConfigError, choice_error
from lockstep.worker.build import find_model
from lockstep.worker.executor import executor_of, worker_of


def run_check(
    size: str = "default",
    model: str | None = None,
    progress: Progress = no_progress,
    seed: int = 0,
    effort: Effort | None = None,
    oracle: bool = False,
    **settings: Any,
) -> Report:
    """Run a check of a size (quick, default, full): distributions, random scenarios, the matrix.

    settings: LLM arguments for all engines. A speculative_config among them names one more drafter
    to check. effort: number of scenarios, treatment of differences, and the shard; the first shard
    includes the distribution tests and the oracle. oracle: compare the plain run's logits with
    those of transformers. Raises ConfigError for an unknown size or a missing oracle, and
    Interrupted. Differences are reported, not raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    effort = effort or Effort(SIZES[size].scenarios, covers=SIZES[size].covers)
    report = Report(size, seed=seed, coverage=Coverage(), shard=effort.shard)
    with running(report):
        sections = _sections(report, model, settings, progress, effort, oracle)
        with _frozen():
            for section in sections:
                section()
                if report.failures and effort.fail_fast:
                    break
        progress("done", 1, 1)
    return report


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep the objects that exist out of garbage collections.

    A collection frees the last engine before the next one: it takes 1 ms instead of 150.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _sections(
    report: Report,
    model: str | None,
    settings: dict[str, Any],
    progress: Progress,
    effort: Effort,
    oracle: bool,
) -> list[Callable[[], object]]:
    """Return the sections of a check in the order of their runs; all share one plain engine."""
    plain = build_plain(model, settings)
    report.numerics = plain.engine.numerics
    drafters, report.skipped = drafters_of(
        executor_of(plain.engine).checkpoint, requested_drafter(settings)
    )
    size = SIZES[report.size]
    engines = shard_engines(report.size, drafters, plain.graph_modes, effort.shard)
    report.num_matrix_cases = len(engines) * size.answers
    adapters = RandomAdapters(worker_of(plain.engine).model)
    companions = Companions(find_model(None), settings)
    runs = _plain_runs(plain, adapters, model, settings, companions)
    is_bundled = model is None
    generator = ScenarioGenerator(
        runs,
        report.seed,
        drafters,
        plain.graph_modes,
        strength=size.strength,
        companions=is_bundled,
        numerics=numerics_of(settings),
        # Engines of the companions are built in less time than a scenario takes.
        per_engine=1 if is_bundled and plain.graph_modes == ("none",) else 2,
        num_requests=size.requests,
        num_ranks=settings.get("tensor_parallel_size") or 1,
    )
    report.num_scenarios = effort.num_scenarios(generator)
    examiner = _examiner(runs, adapters, model, settings, report, companions)
    sections: list[Callable[[], object]] = [
        lambda: run_scenarios(generator, examiner, effort, report, progress),
        lambda: run_matrix(plain, engines, report, model, settings, progress, effort),
    ]
    # The tests of distributions are statistics over all seeds, so no shard can take a part of them.
    if effort.shard.index == 1:
        sections.insert(
            0,
            lambda: run_sampling(runs, examiner.build, size.num_samples, report, effort.fail_fast),
        )
        if oracle:
            sections.insert(0, lambda: run_oracle(plain, report))
    return sections


def run_replay(scenario: Scenario, model: str | None = None, **settings: Any) -> Report:
    """Run the scenario of a file alone. Raises Interrupted."""
    report = Report("replay", num_scenarios=1)
    with running(report):
        plain = build_plain(model, settings)
        report.numerics = plain.engine.numerics
        adapters = RandomAdapters(worker_of(plain.engine).model)
        companions = Companions(find_model(None), settings)
        runs = _plain_runs(plain, adapters, model, settings, companions)
        examiner = _examiner(runs, adapters, model, settings, report, companions)
        replay(scenario, examiner, report)
    return report


def _plain_runs(
    plain: CheckEngine,
    adapters: RandomAdapters,
    model: str | None,
    settings: dict[str, Any],
    companions: Companions,
) -> PlainRuns:
    """Return the plain runs of an engine, and of one with adapters that is built when needed."""
    return PlainRuns(
        plain,
        lambda: build_plain(model, {**settings, **adapters.settings()}),
        companion=companions.plain,
    )


def _examiner(
    runs: PlainRuns,
    adapters: RandomAdapters,
    model: str | None,
    settings: dict[str, Any],
    report: Report,
    companions: Companions,
) -> Examiner:
    def build_kind(kind: Kind) -> CheckEngine:
        if kind.model != SERVED:
            named = (kind.model, kind.numerics)
            engine = companions.build(*named, kind.settings(), kind.hooks(), kind.adapters)
        else:
            settings_of_kind = settings_with(kind.settings(), settings)
            settings_of_kind |= adapters.settings() if kind.adapters else {}
            engine = build(model, settings_of_kind, kind.hooks())
        if report.coverage is not None:
            report.coverage.record_engine(engine.engine, kind.drafter)
        return engine

    return Examiner(runs, build_kind)
