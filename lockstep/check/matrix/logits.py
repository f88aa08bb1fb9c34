"""Logits check: every logit row of 20 prompts must have the bits of the plain run.

It needs no trained weights, so it works at the dimensions of any model. The plain run has one row,
no drafts, no graphs, no chunked prefill and an empty cache.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from lockstep.answer import Answer
from lockstep.check import oracle_drafter
from lockstep.check.checked_model import CheckedModel
from lockstep.check.deadline import NO_DEADLINE, TIME_UP, Deadline
from lockstep.check.drafters import settings_with
from lockstep.check.engines import CheckEngine, Comparison, build
from lockstep.check.events import ACCEPTED, CACHED, DRAFTED, count_events
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.matrix.cases import Batch, Case, prefixes_to_cache
from lockstep.check.matrix.logits_setups import SIZES, batches, engines, long_length, make_cases
from lockstep.check.matrix.logits_setups import settings as engine_settings
from lockstep.check.matrix.setups import LOGITS, PLAIN, Setup
from lockstep.check.report.report import LOGITS_CASES, Report, Tally
from lockstep.errors import CapacityError
from lockstep.spec import own_drafter
from lockstep.spec.config import AUTO_DRAFTS


def run_logits(checked: CheckedModel, deadline: Deadline = NO_DEADLINE) -> None:
    """Run the report's shard of the logits check of its size, and add the results to the report.

    The user's drafter replaces the one in the checkpoint. Raises what LLM raises. Differences are
    in the report, not raised.
    """
    report = checked.report
    size = SIZES[report.size]
    raw = checked.checkpoint.raw
    max_context = raw.get("text_config", raw).get("max_position_embeddings", size.long)
    long = long_length(size, checked.device, max_context)

    def build_setup(setup: Setup, **ranks: int) -> CheckEngine:
        checked.collector.collect()
        arguments = {**engine_settings(setup, size, long), "skip_tokenizer_init": True}
        settings = settings_with(arguments, {**checked.settings, **ranks})
        return build(checked.name, settings, setup.hooks(), None, checked.rank_pool)

    checked.progress("logits: plain outputs", 0, 0)
    plain = _build_plain(build_setup, report, checked.config.tensor_parallel_size)
    cases = make_cases(plain.engine.vocab_size, long, size.max_tokens)
    expected: dict[str, Answer] = {}
    # The other half of the time is for the comparisons.
    plain_deadline = deadline.share(1, 2)
    for case in cases:
        if expected and plain_deadline.passed:
            break
        expected[case.name] = plain.answers([case], LogitDigests())[0]
    report.numerics = plain.engine.numerics
    comparison = Comparison(
        lambda case: expected[case.name], report, Answer.first_logits_difference
    )
    engine_runs = [
        (setup, list(batches(cases, size, index)))
        for index, setup in enumerate(engines(size, plain.graph_modes, *_drafting(checked)))
        if report.shard.has(index)
    ]
    report.planned[LOGITS_CASES] = sum(
        len(batch.cases) for _, engine_batches in engine_runs for batch in engine_batches
    )
    texts = [[*c.prompt, *expected[c.name].tokens] for c in cases if c.name in expected]
    # The plain engine's memory is needed for the first engine of the matrix.
    del plain
    for done, (setup, engine_batches) in enumerate(engine_runs):
        if done and deadline.passed:
            break
        checked.progress(f"logits: {setup.drafting}, graph {setup.graph}", done, len(engine_runs))
        known = [b for b in engine_batches if all(case.name in expected for case in b.cases)]
        if not known:
            continue
        _run_engine(partial(build_setup, setup), setup, known, comparison, texts, deadline)
    checked.collector.collect()
    total = report.planned[LOGITS_CASES]
    if (deadline.passed or len(expected) < len(cases)) and comparison.compared < total:
        missing = f"{total - comparison.compared} of {total} outputs of {LOGITS}"
        report.omit(LOGITS, missing, TIME_UP)


def _build_plain(
    build_setup: Callable[..., CheckEngine], report: Report, num_ranks: int
) -> CheckEngine:
    """Build the engine of the plain run on one rank, or on all if one has not enough memory."""
    try:
        return build_setup(PLAIN, tensor_parallel_size=1)
    except (CapacityError, torch.OutOfMemoryError) as error:
        if num_ranks == 1:
            raise
        report.omit(LOGITS, "plain run on one rank", f"one rank has not enough memory: {error}")
    return build_setup(PLAIN)


def _drafting(checked: CheckedModel) -> tuple[str | None, int]:
    """Return the drafter and K of one more engine: the user's, or the checkpoint's own."""
    requested = checked.drafting
    if requested is None:
        return own_drafter(checked.checkpoint), AUTO_DRAFTS
    return requested["method"], requested.get("num_speculative_tokens", AUTO_DRAFTS)


def _run_engine(
    build_engine: Callable[[], CheckEngine],
    setup: Setup,
    engine_batches: list[Batch],
    comparison: Comparison,
    texts: list[list[int]],
    deadline: Deadline,
) -> None:
    """Build an engine and run its batches. An exception is a failure; other engines still run.

    texts: prompts with their plain outputs, for the oracle drafter.
    """
    started = time.monotonic()
    try:
        engine = build_engine()
        if comparison.report.coverage is not None:
            comparison.report.coverage.record_engine(engine.engine, setup.drafter)
        if setup.drafter == oracle_drafter.NAME:
            engine.set_texts(texts)
        for batch in engine_batches:
            _run_batch(engine, setup, batch, comparison)
            if deadline.passed:
                return
    except Exception as error:  # an engine that breaks has not given the plain answer
        comparison.report.fail(setup, "all", f"raised {type(error).__name__}: {error}")
        seconds = round(time.monotonic() - started, 2)
        comparison.report.add(Tally(setup, 1, 1, seconds))


def _run_batch(engine: CheckEngine, setup: Setup, batch: Batch, comparison: Comparison) -> None:
    """Run a batch on an empty cache, or with its prefixes cached, and compare the outputs."""
    started = time.monotonic()
    report = comparison.report
    num_failures = len(report.failures)
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
