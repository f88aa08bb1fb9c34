"""The token matrix: every answer of every engine must equal the plain run's, bit for bit."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check import asks as asking
from lockstep.check.asks import Answer, Ask
from lockstep.check.engines import build_llm
from lockstep.check.matrix import BATCHES, PLAIN, SIZES, Setup, Size, setups
from lockstep.check.report import Failure, Report, Tally
from lockstep.check.trace import first_difference
from lockstep.config import GRAPH_MODES
from lockstep.llm import LLM
from lockstep.spec import refusals

Progress = Callable[[str, int, int], None]


def run_matrix(
    plain: LLM,
    report: Report,
    model: str | None,
    settings: dict[str, Any],
    progress: Progress,
    fail_fast: bool = False,
) -> None:
    """Runs the matrix of the report's size and adds to the report."""
    size = SIZES[report.size]
    asks = asking.make_asks(plain, size.max_tokens)
    expected = {a.name: asking.run(plain, [a])[0] for a in asks}
    engines = setups(report.size, drafters_of(plain)[0], graphs_of(plain))
    before = len(report.failures)
    for done, setup in enumerate(engines):
        progress(f"{setup.drafting}, {setup.phase}", done, len(engines))
        runs = batches(asks, size, done)
        _Engine(setup, runs, expected, report).run(model, settings)
        gc.collect()
        if fail_fast and len(report.failures) > before:
            return
    if len(report.failures) > before:
        report.failures[before] = _locate(report.failures[before], asks, size, model, settings)


def drafters_of(plain: LLM) -> tuple[tuple[str, ...], list[str]]:
    """The drafters that this checkpoint allows, and why others are left out."""
    found = refusals(plain.engine.model_config)
    allowed = tuple(name for name, why in found.items() if why is None)
    return allowed, [f"{name}: {why}" for name, why in found.items() if why is not None]


def graphs_of(plain: LLM) -> tuple[str, ...]:
    """The graph modes of this device, the product's default first."""
    return GRAPH_MODES if plain.engine.plan.device == "cuda" else ("none",)


def batches(asks: list[Ask], size: Size, turn: int) -> list[tuple[str, list[Ask]]]:
    """Who runs together on the `turn`th engine: some alone, the seven, and the long one amid some.

    The asks that run alone, and the long one's company, move on from engine to engine.
    """
    *short, long = asks
    alone = [asks[(turn * size.alone + i) % len(asks)] for i in range(size.alone)]
    company = [short[(turn * size.company + i) % len(short)] for i in range(size.company)]
    half = (size.company + 1) // 2
    return [
        *((BATCHES[0], [ask]) for ask in alone),
        (BATCHES[1], short),
        (BATCHES[2], [*company[:half], long, *company[half:]]),
    ]


@dataclass
class _Engine:
    """All runs of one engine."""

    setup: Setup
    runs: list[tuple[str, list[Ask]]]
    expected: dict[str, Answer]
    report: Report

    def run(self, model: str | None, settings: dict[str, Any]) -> None:
        """Builds the engine, asks everything, compares, and adds to the report."""
        started, before = time.monotonic(), len(self.report.failures)
        cases = 0
        try:
            own = {**self.setup.settings(), **settings}
            cases = self._run_all(build_llm(model, own, self.setup.hooks()))
        except Exception as error:  # an engine that breaks has not given the plain answer
            what = f"raised {type(error).__name__}: {error}"
            self._fail_all(what)
        failed = len(self.report.failures) - before
        seconds = round(time.monotonic() - started, 2)
        self.report.add(Tally(self.setup, max(cases, failed), failed, seconds))

    def _run_all(self, llm: LLM) -> int:
        """Every batch; returns how many answers were compared."""
        if self.setup.phase == "prefix hit":
            asking.prime(llm, [ask for _, members in self.runs for ask in members])
        seen: Counter[str] = Counter()
        for batch, members in self.runs:
            answers = asking.run(llm, members)
            seen += self._exercised(answers)
            for ask, answer in zip(members, answers, strict=True):
                self._compare(batch, ask, answer)
        self._check_exercised(seen)
        self.report.exercised = dict(Counter(self.report.exercised) + seen)
        return sum(len(members) for _, members in self.runs)

    def _fail_all(self, what: str) -> None:
        self.report.failures.append(Failure(self.setup, "all", "every request", "all", None, what))

    def _compare(self, batch: str, ask: Ask, answer: Answer) -> None:
        difference = answer.first_difference(self.expected[ask.name])
        if difference is not None:
            position, what = difference
            self.report.failures.append(
                Failure(self.setup, batch, ask.name, ask.sampling, position, what)
            )

    def _exercised(self, answers: list[Answer]) -> Counter[str]:
        total: Counter[str] = Counter()
        for metrics in (a.metrics for a in answers):
            total["cached tokens"] += metrics.num_cached_tokens
            total["preemptions"] += metrics.num_preemptions
            total["drafted"] += metrics.num_draft_tokens
            total["accepted"] += metrics.num_accepted_tokens
        return total

    def _check_exercised(self, seen: Counter[str]) -> None:
        """An axis that never took place proves nothing: that is a failure too."""
        wanted = {"prefix hit": "cached tokens", "preempted": "preemptions"}
        needed = [wanted[self.setup.phase]] if self.setup.phase in wanted else []
        needed += ["drafted"] if self.setup.k else []
        for name in needed:
            if not seen[name]:
                self._fail_all(f"no {name} at all")


def _locate(
    failure: Failure, asks: list[Ask], size: Size, model: str | None, settings: dict[str, Any]
) -> Failure:
    """The failure with the first layer and op that differ, found by running it again, watched."""
    if failure.position is None:
        return failure
    ask = next(a for a in asks if a.name == failure.request)
    suspect = replace(failure.setup, graph="none")
    where = first_difference(
        lambda: LLM(model, **PLAIN.settings(small_chunks=False), **settings),
        lambda: build_llm(model, {**suspect.settings(), **settings}, suspect.hooks()),
        ask,
        [ask] if failure.batch == BATCHES[0] else _company(failure, ask, asks, size),
        primed=asks if suspect.phase == "prefix hit" else [],
        end=len(ask.prompt) + failure.position,
    )
    if where is None:
        where = "no module of the model differs when run eagerly: look at the sampler or the graph"
    return replace(failure, where=where)


def _company(failure: Failure, ask: Ask, asks: list[Ask], size: Size) -> list[Ask]:
    """The batch of that name that holds the ask: whichever engine's turn it was."""
    for turn in range(len(asks)):
        for batch, members in batches(asks, size, turn):
            if batch == failure.batch and ask in members:
                return members
    return [ask]
