"""The logits matrix: 20 prompts whose every row of logits must have the plain run's bits.

It needs no trained weights, so it shows the contract at the dimensions of any model. The plain run
has one row, no drafts, no graphs, whole prompts at once and nothing cached.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.check import answer_oracle
from lockstep.check.answers import Answer, took_place
from lockstep.check.cases import Batch, Case, beginnings
from lockstep.check.digests import LogitDigests
from lockstep.check.drafters import asked_drafter, settings_with
from lockstep.check.harness import CheckEngine, Comparison, build
from lockstep.check.logits_matrix import SIZES, batches, engines, make_cases
from lockstep.check.logits_matrix import settings as engine_settings
from lockstep.check.matrix import COLD, PLAIN, PREFIX_HIT, Setup
from lockstep.check.report import Report, Tally, running
from lockstep.check.shard import WHOLE, Shard
from lockstep.errors import ConfigError, choice_error
from lockstep.models.checkpoint import Checkpoint
from lockstep.spec import own_drafter
from lockstep.worker.build import find_model


def run_logits(
    size: str = "default",
    model: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
    shard: Shard = WHOLE,
    **settings: Any,
) -> Report:
    """Runs a shard of the logits matrix of a size (quick, default, full).

    `settings` are LLM's, for all; the drafter of a speculative_config among them takes the place
    of the checkpoint's own.

    Raises ConfigError on an unknown size, and Interrupted. Differences are in the report, not
    raised.
    """
    if size not in SIZES:
        raise choice_error(ConfigError, "size", size, ", ".join(SIZES), "Choose one of them.")
    report = Report(size, compared="logits", shard=shard)
    with running(report):
        _run_shard(report, model, progress, settings)
    return report


def _run_shard(
    report: Report,
    model: str | None,
    progress: Callable[[str, int, int], None],
    settings: dict[str, Any],
) -> None:
    """Runs the report's shard of the matrix of its size, and adds to it."""
    chosen = SIZES[report.size]
    checkpoint = Checkpoint.read(find_model(model), settings.get("hf_overrides"))
    raw = checkpoint.raw
    room = raw.get("text_config", raw).get("max_position_embeddings", chosen.long)
    long = min(chosen.long, room - chosen.max_tokens)

    def build_setup(setup: Setup) -> CheckEngine:
        gc.collect()
        own = {**engine_settings(setup, chosen, long), "skip_tokenizer_init": True}
        return build(model, settings_with(own, settings), setup.hooks())

    plain = build_setup(PLAIN)
    cases = make_cases(plain.engine.vocab_size, long, chosen.max_tokens)
    expected = {case.name: plain.answers([case], LogitDigests())[0] for case in cases}
    report.numerics = plain.engine.numerics
    comparison = Comparison(expected, report, Answer.first_logits_difference)
    asked = asked_drafter(settings)
    own = asked["method"] if asked else own_drafter(checkpoint)
    every = [
        (setup, list(batches(cases, chosen, turn)))
        for turn, setup in enumerate(engines(chosen, plain.graphs, own))
        if report.shard.has(turn)
    ]
    report.cases_due = sum(len(batch.cases) for _, runs in every for batch in runs)
    texts = [[*case.prompt, *expected[case.name].tokens] for case in cases]
    del plain
    for done, (setup, runs) in enumerate(every):
        progress(f"{setup.drafting}, graph {setup.graph}", done, len(every))
        _run_engine(partial(build_setup, setup), setup, runs, comparison, texts)
    progress("done", len(every), len(every))


def _run_engine(
    make: Callable[[], CheckEngine],
    setup: Setup,
    runs: list[Batch],
    comparison: Comparison,
    texts: list[list[int]],
) -> None:
    """Builds an engine and runs its batches. One that breaks is a failure, and the others follow.

    texts: the prompts with their plain answers, for a drafter that is told them.
    """
    started = time.monotonic()
    try:
        engine = make()
        if setup.drafter == answer_oracle.NAME:
            engine.tell(texts)
        for batch in runs:
            _run_batch(engine, setup, batch, comparison)
    except Exception as error:  # an engine that breaks has not given the plain answer
        comparison.report.fail(setup, "all", f"raised {type(error).__name__}: {error}")
        seconds = round(time.monotonic() - started, 2)
        comparison.report.add(Tally(setup, 1, 1, seconds))


def _run_batch(engine: CheckEngine, setup: Setup, batch: Batch, comparison: Comparison) -> None:
    """Runs a batch with nothing cached but its own prompts, compares, and adds to the report."""
    started = time.monotonic()
    report = comparison.report
    before = len(report.failures)
    setup = replace(setup, phase=PREFIX_HIT if batch.primed else COLD)
    engine.renew(max_num_batched_tokens=batch.chunk)
    if batch.primed:
        _prime(engine, batch.cases)
    digests = LogitDigests()
    answers = comparison.run(engine, setup, batch, digests)
    for what in _not_exercised(setup, batch, took_place(answers), digests.rows):
        report.fail(setup, batch.name, what)
    failed = len(report.failures) - before
    seconds = round(time.monotonic() - started, 2)
    report.add(Tally(setup, len(answers), failed, seconds, batch.name))


def _prime(engine: CheckEngine, cases: tuple[Case, ...]) -> None:
    """Puts the prompts' beginnings into the prefix cache."""
    engine.cache(beginnings(cases))


def _not_exercised(setup: Setup, batch: Batch, seen: Counter[str], rows: int) -> list[str]:
    """What was to take place and did not: a run without it proves nothing. rows: the most that a
    step decoded."""
    wanted = ["cached tokens"] if batch.primed else []
    wanted += ["drafted"] if setup.k else []
    wanted += ["accepted"] if setup.drafter == answer_oracle.NAME else []
    lacks = [f"no {name} at all" for name in wanted if not seen[name]]
    if not batch.primed and seen["cached tokens"]:
        lacks.append("cached tokens in a cold run")
    if batch.name.endswith("rows") and rows != len(batch.cases):
        lacks.append(f"no step decoded more than {rows} rows")
    return lacks
