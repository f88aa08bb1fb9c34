"""The logits matrix: 20 prompts whose every row of logits must have the plain run's bits.

It needs no trained weights, so it shows the contract at the dimensions of any model. The plain run
has one row, no drafts, no graphs, whole prompts at once and nothing cached.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check import answer_oracle
from lockstep.check.asks import PREFIX_TAIL, Ask
from lockstep.check.digests import watch
from lockstep.check.engines import build_llm
from lockstep.check.logits_matrix import SIZES, Batch, Size, batches, engines, make_asks
from lockstep.check.logits_matrix import settings as engine_settings
from lockstep.check.matrix import PLAIN, Setup
from lockstep.check.report import Failure, Report, Tally
from lockstep.engine.build import find_model
from lockstep.errors import ConfigError, choice_error
from lockstep.llm import LLM
from lockstep.models.loader import read_config
from lockstep.sampling_params import SamplingParams
from lockstep.spec import own_drafter


@dataclass(frozen=True)
class Answer:
    """tokens, and a digest of all bits of the logits in front of each; cached: prompt tokens."""

    tokens: tuple[int, ...]
    digests: tuple[int, ...]
    cached: int
    drafted: int
    accepted: int

    def first_difference(self, plain: "Answer") -> tuple[int, str] | None:
        """Index of the first token whose logits differ, or which itself does, and what."""
        for index, (token, digest) in enumerate(zip(plain.tokens, plain.digests, strict=True)):
            if self.digests[index : index + 1] != (digest,):
                return index, "the bits of the logits differ"
            if self.tokens[index : index + 1] != (token,):
                return index, "the logits are equal and the token is another"
        return None


def run_logits(
    size: str = "default",
    model: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    **settings: Any,
) -> Report:
    """Runs the logits matrix of a size (quick, default, full); `settings` are LLM's, for all.

    Raises ConfigError on an unknown size. Differences are in the report, not raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    started, chosen = time.monotonic(), SIZES[size]
    raw = read_config(find_model(model))
    own = own_drafter(raw)
    positions = raw.get("text_config", raw).get("max_position_embeddings", chosen.long)
    long = min(chosen.long, positions - chosen.max_tokens)

    def build(setup: Setup) -> LLM:
        gc.collect()
        every = {**settings, **engine_settings(setup, chosen, long), "skip_tokenizer_init": True}
        return build_llm(model, every, setup.hooks())

    plain = build(PLAIN)
    asks = make_asks(plain.engine.vocab_size, long, chosen.max_tokens)
    expected = {ask.name: _run(plain, [ask])[0][0] for ask in asks}
    report = Report(size, plain.engine.numerics, compared="logits")
    cuda = plain.engine.plan.device == "cuda"
    del plain
    every = list(engines(chosen, ("full", "piecewise", "none") if cuda else ("none",), own))
    for turn, setup in enumerate(every):
        progress(f"{setup.drafting}, graph {setup.graph}", turn, len(every))
        _Engine(setup, build(setup), asks, expected, report).run(chosen, turn)
    progress("done", len(every), len(every))
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Engine:
    """All runs of one engine."""

    setup: Setup
    llm: LLM
    asks: list[Ask]
    expected: dict[str, Answer]
    report: Report

    def run(self, size: Size, turn: int) -> None:
        """Runs every batch, compares, and adds to the report."""
        if self.setup.drafter == answer_oracle.NAME:
            texts = [[*a.prompt, *self.expected[a.name].tokens] for a in self.asks]
            self.llm.engine.runner.program.drafter.tell(texts)  # type: ignore[attr-defined]
        for batch in batches(self.asks, size, turn):
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        started, before = time.monotonic(), len(self.report.failures)
        setup = replace(self.setup, phase="prefix hit" if batch.primed else "cold")
        engine = self.llm.engine
        engine.clear()
        engine.scheduler.budget = batch.chunk
        if batch.primed:
            _prime(self.llm, batch.asks)
        answers, rows = _run(self.llm, list(batch.asks))
        for ask, answer in zip(batch.asks, answers, strict=True):
            difference = answer.first_difference(self.expected[ask.name])
            if difference is not None:
                self._fail(setup, batch, *difference, ask)
        for lacks in self._not_exercised(batch, answers, rows):
            self._fail(setup, batch, None, lacks)
        failed = len(self.report.failures) - before
        seconds = round(time.monotonic() - started, 2)
        tally = Tally(setup, len(answers), failed, seconds, batch.name)
        self.report.tallies.append(tally)

    def _fail(
        self, setup: Setup, batch: Batch, position: int | None, what: str, ask: Ask | None = None
    ) -> None:
        name, sampling = (ask.name, ask.sampling) if ask else ("every request", "all")
        self.report.failures.append(Failure(setup, batch.name, name, sampling, position, what))

    def _not_exercised(self, batch: Batch, answers: list[Answer], rows: int) -> list[str]:
        """An axis that never took place proves nothing: that is a failure too."""
        seen = Counter(
            {
                "cached tokens": sum(a.cached for a in answers),
                "drafted": sum(a.drafted for a in answers),
                "accepted": sum(a.accepted for a in answers),
            }
        )
        self.report.exercised = dict(Counter(self.report.exercised) + seen)
        wanted = ["cached tokens"] if batch.primed else []
        wanted += ["drafted"] if self.setup.k else []
        wanted += ["accepted"] if self.setup.drafter == answer_oracle.NAME else []
        lacks = [f"no {name} at all" for name in wanted if not seen[name]]
        if not batch.primed and seen["cached tokens"]:
            lacks.append("cached tokens in a cold run")
        if batch.name.endswith("rows") and rows != len(batch.asks):
            lacks.append(f"no step decoded more than {rows} rows")
        return lacks


def _run(llm: LLM, asks: list[Ask]) -> tuple[list[Answer], int]:
    """Asks all of them at once; the answers, and the most rows that one step decoded."""
    with watch(llm) as seen:
        outputs = llm.generate(
            [{"prompt_token_ids": list(a.prompt)} for a in asks], [a.params for a in asks]
        )
    digests, answers = seen.by_request(), []
    for output in outputs:
        tokens, metrics = output.outputs[0].token_ids, output.metrics
        own = digests.get(output.request_id, [])[: len(tokens)]
        counts = (metrics.num_cached_tokens, metrics.num_draft_tokens, metrics.num_accepted_tokens)
        answers.append(Answer(tuple(tokens), tuple(own), *counts))
    return answers, seen.rows


def _prime(llm: LLM, asks: tuple[Ask, ...]) -> None:
    """Puts the prompts' beginnings into the prefix cache, by asking something else about them."""
    once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": list(a.prompt[:-PREFIX_TAIL])} for a in asks], once)
