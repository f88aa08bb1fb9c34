"""Logits check: every logit row of 20 prompts must have the bits of the plain run.

It needs no trained weights, so it works at the dimensions of any model. The plain run has one row,
no drafts, no graphs, no chunked prefill and an empty cache.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lockstep.answer import Answer
from lockstep.check import oracle_drafter
from lockstep.check.drafters import requested_drafter, settings_with
from lockstep.check.engines import CheckEngine, Comparison, build
from lockstep.check.judges.answers import ACCEPTED, CACHED, DRAFTED, count_events
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.matrix.cases import Batch, Case, prefixes_to_cache
from lockstep.check.matrix.logits_setups import SIZES, batches, engines, make_cases
from lockstep.check.matrix.logits_setups import settings as engine_settings
from lockstep.check.matrix.setups import COLD, PLAIN, PREFIX_HIT, Setup
from lockstep.check.report.progress import Progress, no_progress
from lockstep.check.report.report import Report, Tally, running
from lockstep.check.shard import WHOLE, Shard
from lockstep.errors import ConfigError, choice_error
from lockstep.models.checkpoint import Checkpoint
from lockstep.spec import own_drafter
from lockstep.worker.build import find_model


def run_logits(
    size: str = "default",
    model: str | None = None,
    progress: Progress = no_progress,
    shard: Shard = WHOLE,
    **settings: Any,
) -> Report:
    """Run a shard of the logits check of a size (quick, default, full).

    settings: LLM arguments for all engines. The drafter of a speculative_config among them replaces
    the one in the checkpoint.

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
    progress: Progress,
    settings: dict[str, Any],
) -> None:
    """Run the report's shard, and add the results to the report."""
    size = SIZES[report.size]
    checkpoint = Checkpoint.read(find_model(model), settings.get("hf_overrides"))
    raw = checkpoint.raw
    max_context = raw.get("text_config", raw).get("max_position_embeddings", size.long)
    long = min(size.long, max_context - size.max_tokens)

    def build_setup(setup: Setup) -> CheckEngine:
        # Objects of an engine refer to each other: only a collection frees its memory.
        gc.collect()
        arguments = {**engine_settings(setup, size, long), "skip_tokenizer_init": True}
        return build(model, settings_with(arguments, settings), setup.hooks())

    plain = build_setup(PLAIN)
    cases = make_cases(plain.engine.vocab_size, long, size.max_tokens)
    expected = {case.name: plain.answers([case], LogitDigests())[0] for case in cases}
    report.numerics = plain.engine.numerics
    comparison = Comparison(expected, report, Answer.first_logits_difference)
    requested = requested_drafter(settings)
    drafter = requested["method"] if requested else own_drafter(checkpoint)
    engine_runs = [
        (setup, list(batches(cases, size, index)))
        for index, setup in enumerate(engines(size, plain.graph_modes, drafter))
        if report.shard.has(index)
    ]
    report.num_matrix_cases = sum(
        len(batch.cases) for _, engine_batches in engine_runs for batch in engine_batches
    )
    texts = [[*case.prompt, *expected[case.name].tokens] for case in cases]
    # Its memory is needed for the first engine of the matrix.
    del plain
    for done, (setup, engine_batches) in enumerate(engine_runs):
        progress(f"logits: {setup.drafting}, graph {setup.graph}", done, len(engine_runs))
        _run_engine(partial(build_setup, setup), setup, engine_batches, comparison, texts)
    progress("done", len(engine_runs), len(engine_runs))


def _run_engine(
    build_engine: Callable[[], CheckEngine],
    setup: Setup,
    engine_batches: list[Batch],
    comparison: Comparison,
    texts: list[list[int]],
) -> None:
    """Build an engine and run its batches. An exception is a failure; other engines still run.

    texts: prompts with their plain outputs, for the oracle drafter.
    """
    started = time.monotonic()
    try:
        engine = build_engine()
        if setup.drafter == oracle_drafter.NAME:
            engine.set_texts(texts)
        for batch in engine_batches:
            _run_batch(engine, setup, batch, comparison)
    except Exception as error:  # an engine that breaks has not given the plain answer
        comparison.report.fail(setup, "all", f"raised {type(error).__name__}: {error}")
        seconds = round(time.monotonic() - started, 2)
        comparison.report.add(Tally(setup, 1, 1, seconds))


def _run_batch(engine: CheckEngine, setup: Setup, batch: Batch, comparison: Comparison) -> None:
    """Run a batch on an empty cache, or with its prefixes cached, and compare the outputs."""
    started = time.monotonic()
    report = comparison.report
    num_failures = len(report.failures)
    setup = replace(setup, phase=PREFIX_HIT if batch.warm_prefixes else COLD)
    engine.reset(max_num_batched_tokens=batch.chunk)
    if batch.warm_prefixes:
        _cache_prefixes(engine, batch.cases)
    digests = LogitDigests()
    answers = comparison.run(engine, setup, batch, digests)
    for what in _missing_events(setup, batch, count_events(answers), digests.max_rows):
        report.fail(setup, batch.name, what)
    failed = len(report.failures) - num_failures
    seconds = round(time.monotonic() - started, 2)
    report.add(Tally(setup, len(answers), failed, seconds, batch.name))


def _cache_prefixes(engine: CheckEngine, cases: tuple[Case, ...]) -> None:
    """Add prefixes of the prompts to the prefix cache."""
    engine.cache(prefixes_to_cache(cases))


def _missing_events(setup: Setup, batch: Batch, events: Counter[str], rows: int) -> list[str]:
    """Return the required events that did not occur. rows: maximum rows of a decoding step."""
    required = [CACHED] if batch.warm_prefixes else []
    required += [DRAFTED] if setup.k else []
    required += [ACCEPTED] if setup.drafter == oracle_drafter.NAME else []
    missing = [f"the run had no {name}" for name in required if not events[name]]
    if not batch.warm_prefixes and events[CACHED]:
        missing.append("a cold run had cached tokens")
    if batch.name.endswith("rows") and rows != len(batch.cases):
        missing.append(f"no step decoded more than {rows} rows")
    return missing
