"""The token matrix: every answer of every engine must equal the plain run's, bit for bit."""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check import asks as asking
from lockstep.check.asks import Answer, Ask
from lockstep.check.matrix import BATCHES, DRAFTERS, PLAIN, SIZES, Setup, Size, setups
from lockstep.check.report import Failure, Report, Tally
from lockstep.check.trace import first_difference
from lockstep.errors import ConfigError, choice_error
from lockstep.llm import LLM

Progress = Callable[[str, int, int], None]


def run_check(
    size: str = "default",
    model: str | None = None,
    progress: Progress = lambda what, done, of: None,
    **settings: Any,
) -> Report:
    """Runs the matrix of a size (quick, default, full); `settings` are LLM's, for all engines.

    Raises ConfigError on an unknown size. Differences are in the report, not raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    started = time.monotonic()
    plain = LLM(model, **PLAIN.settings(small_chunks=False), **settings)
    asks = asking.make_asks(plain, SIZES[size].max_tokens)
    expected = {a.name: asking.run(plain, [a])[0] for a in asks}
    report = Report(size, plain.engine.numerics)
    drafters, report.skipped = _drafters(plain)
    graphs = ("full", "piecewise", "none") if plain.engine.plan.device == "cuda" else ("none",)
    del plain
    engines = setups(size, drafters, graphs)
    for done, setup in enumerate(engines):
        progress(f"{setup.drafting}, {setup.phase}", done, len(engines))
        runs = batches(asks, SIZES[size], done)
        _Engine(setup, runs, expected, report).run(model, settings)
        gc.collect()
    progress("done", len(engines), len(engines))
    if report.failures:
        report.failures[0] = _locate(report.failures[0], asks, SIZES[size], model, settings)
    report.seconds = time.monotonic() - started
    return report


def _drafters(plain: LLM) -> tuple[tuple[str, ...], list[str]]:
    """The drafters that this checkpoint allows, and why others are left out."""
    raw = plain.engine.model_config
    if raw.get("text_config", raw).get("mtp_num_hidden_layers"):
        return DRAFTERS, []
    return ("ngram",), ["mtp: the checkpoint has no MTP module"]


def batches(asks: list[Ask], size: Size, turn: int) -> list[tuple[str, list[Ask]]]:
    """Who runs together on the `turn`th engine: some alone, the seven, and the long one amid some.

    The asks that run alone, and the long one's company, move on from engine to engine.
    """
    *short, long = asks
    alone = [asks[(turn * size.alone + i) % len(asks)] for i in range(size.alone)]
    company = [short[(turn * size.company + i) % len(short)] for i in range(size.company)]
    half = size.company // 2 + 1
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
        started, before, cases = time.monotonic(), len(self.report.failures), 0
        llm = LLM(model, **self.setup.settings(), **settings)
        if self.setup.phase == "prefix hit":
            asking.prime(llm, [ask for _, members in self.runs for ask in members])
        seen: Counter[str] = Counter()
        for batch, members in self.runs:
            answers = asking.run(llm, members)
            cases += len(members)
            seen += self._exercised(answers)
            for ask, answer in zip(members, answers, strict=True):
                self._compare(batch, ask, answer)
        self._check_exercised(seen)
        self.report.exercised = dict(Counter(self.report.exercised) + seen)
        failed = len(self.report.failures) - before
        tally = Tally(self.setup, cases, failed, round(time.monotonic() - started, 2))
        self.report.tallies.append(tally)

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
                self.report.failures.append(
                    Failure(self.setup, "all", "every request", "all", None, f"no {name} at all")
                )


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
        lambda: LLM(model, **suspect.settings(), **settings),
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
