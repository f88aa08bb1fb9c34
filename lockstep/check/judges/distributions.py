"""Statistical tests of the sampler: sampled tokens against their exact distribution.

The engine samples tokens from one row of raw logits of a plain run, with a different seed for each
token, at a single position and at all positions of a verification window. numpy_sampler computes
the expected distribution in float64, without noise. Seeds are fixed, so each run gives the same
figures.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.check import oracle_drafter
from lockstep.check.deadline import NO_DEADLINE, TIME_UP, Deadline
from lockstep.check.engines import CheckEngine
from lockstep.check.judges import numpy_sampler
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.matrix.setups import SAMPLING, Setup
from lockstep.check.report.report import Report, Tally
from lockstep.check.scenarios.scenario import Kind
from lockstep.example_prompts import short_prompts
from lockstep.kernels.threads import one_thread
from lockstep.llm import LLM
from lockstep.progress import Progress, ignore_progress
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import RowSpec
from lockstep.worker.executor import executor_of
from lockstep.worker.rows import write_row
from lockstep.worker.worker import Worker

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
NUM_DRAFTS = 7
"""Drafts of a verification window."""
ROWS = 16
"""Rows per call of the sampler."""
MIN_P_VALUE = 1e-6
"""p-value below which a test fails; 40 tests reject a correct sampler with probability 4e-5."""
SEED = 2**40 + 12345
"""First seed of the tests; it has bits in both 32-bit halves."""
MIN_EXPECTED_COUNT = 5.0
"""Minimum expected count of a bin of a chi-squared test."""
NUM_CLASSES = 4
"""Classes of equal probability in a test of independence."""
SEED_BITS = 64
"""Bits of a seed."""
TEMPERATURES = {"low temperature": 2.0**-13, "high temperature": 64.0}
"""Factors of temperature and logits: their quotient and the distribution stay the same."""
LAST_TEST = "seeds"
"""Name of the test that runs last."""


@dataclass(frozen=True)
class SamplingContext:
    """Sampling context: raw logits [V], the prompt, the output so far, and the drafts after it."""

    raw_logits: Tensor
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    drafts: tuple[int, ...]
    eos_ids: frozenset[int]

    def token_context(self, window_index: int) -> numpy_sampler.TokenContext:
        """Return the context of the token after this number of drafts."""
        return numpy_sampler.TokenContext(
            self.prompt, self.output + self.drafts[:window_index], self.eos_ids
        )


def base_params(context: SamplingContext) -> SamplingParams:
    """Return parameters with only a temperature: two samples are equal with p 0.04 to 0.2."""
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=64, detokenize=False)
    for _ in range(40):
        p_equal = float((token_probabilities(context, params, 0) ** 2).sum())
        if 0.04 <= p_equal <= 0.2:
            break
        factor = 1.15 if p_equal > 0.2 else 0.85
        params = replace(params, temperature=params.temperature * factor)
    return params


def parameter_cases(context: SamplingContext) -> dict[str, SamplingParams]:
    """Return test parameters by name: each that changes the distribution, and all together.

    They refer to the most probable tokens, so that each parameter has an effect.
    """
    likely_tokens = [int(t) for t in torch.topk(context.raw_logits, 8).indices]
    base = base_params(context)
    temperature = base.temperature
    last_token = context.output[-1]
    single_changes: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.7 * temperature},
        "top_k": {"top_k": 4},
        "top_p": {"top_p": 0.8},
        "top_p and presence_penalty": {"top_p": 0.5, "presence_penalty": 2.0},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "presence_penalty": {"presence_penalty": -1.5},
        "logit_bias": {"logit_bias": {likely_tokens[0]: -2.0, likely_tokens[3]: 2.0}},
        "allowed_token_ids": {"allowed_token_ids": likely_tokens[1:6]},
        "bad_words": {"bad_words_ids": [[likely_tokens[0]], [last_token, likely_tokens[1]]]},
        "min_tokens": {"min_tokens": len(context.output) + 3, "stop_token_ids": likely_tokens[:2]},
    }
    combined = {
        "temperature": 1.3 * temperature, "top_k": 200, "top_p": 0.95, "min_p": 0.001,
        "repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.5,
        "logit_bias": {likely_tokens[2]: 1.0}, "bad_words_ids": [[likely_tokens[1]]],
    }  # fmt: skip
    return {
        name: _away_from_filter_bounds(replace(base, **changes), context)
        for name, changes in {
            "no parameter": {},
            **single_changes,
            "all together": combined,
        }.items()
    }


def _away_from_filter_bounds(params: SamplingParams, context: SamplingContext) -> SamplingParams:
    """Adjust the parameters until no token is within rounding of a filter's bound."""
    # fp32 and float64 may disagree at a bound, which would fail a sound sampler.
    for _ in range(50):
        masked = [
            numpy_sampler.masked_logits(
                context.raw_logits.numpy(), context.token_context(num_drafts), params
            )
            for num_drafts in range(8)
        ]
        if not any(_depends_on_rounding(scores / params.temperature, params) for scores in masked):
            return params
        if params.top_p < 1:
            params = replace(params, top_p=params.top_p - 0.003)
        if params.min_p > 0:
            params = replace(params, min_p=params.min_p * 0.97)
        if params.top_k > 0:
            params = replace(params, top_k=params.top_k + 1)
    return params


def _depends_on_rounding(scores: Floats, params: SamplingParams) -> bool:
    """Return whether rounding decides if a filter keeps a token of scores [V]."""
    loose, strict = (
        numpy_sampler.filter_mask(scores, params, tolerance)
        for tolerance in (numpy_sampler.SCORE_TOLERANCE, -numpy_sampler.SCORE_TOLERANCE)
    )
    return not np.array_equal(loose, strict)


def token_probabilities(
    context: SamplingContext, params: SamplingParams, num_drafts: int
) -> Floats:
    """Return the probabilities [V] of the token after `num_drafts` drafts."""
    scores = numpy_sampler.masked_logits(
        context.raw_logits.numpy(), context.token_context(num_drafts), params
    )
    if params.temperature < numpy_sampler.GREEDY_BELOW:
        # Of equal scores the smallest id wins.
        return np.eye(1, len(scores), int(scores.argmax()))[0]
    scores = scores / params.temperature
    scores = np.where(numpy_sampler.filter_mask(scores, params, 0.0), scores, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def tied_logits(raw_logits: Tensor) -> Tensor:
    """Return raw logits [V] that are rounded until two or more are the largest."""
    step = 0.25
    while True:
        rounded = torch.round(raw_logits / step) * step
        if int((rounded == rounded.max()).sum()) > 1:
            return rounded
        step *= 2


def tie_cases(context: SamplingContext) -> dict[str, SamplingParams]:
    """Return test parameters by name: a greedy choice among ties, and top_k that ends within ties.

    context: has the logits of tied_logits().
    """
    base = base_params(context)
    ordered = context.raw_logits.sort(descending=True).values
    ends = (ordered[1:] == ordered[:-1]).nonzero()[:, 0] + 1
    top_k = int(ends[ends > 1].min()) if bool((ends > 1).any()) else 1
    return {
        "ties, greedy": replace(base, temperature=0.0),
        "ties, top_k": replace(base, top_k=top_k),
    }


class EngineSampler:
    """Sampler of one engine, applied to a context."""

    def __init__(self, llm: LLM, context: SamplingContext) -> None:
        self.llm = llm
        self.context = context

    def requests(self, params: SamplingParams, count: int) -> list[Request]:
        """Return `count` completions of one request, with the seeds that the processor derives."""
        prompt = {"prompt_token_ids": list(self.context.prompt)}
        requests = []
        # A request has at most 128 completions.
        for first in range(0, count, 128):
            params_of_batch = replace(
                params, n=min(128, count - first), seed=(params.seed or 0) + first
            )
            requests += self.llm.processor.requests(f"draw-{first}", prompt, params_of_batch)
        return requests

    def sample(self, requests: Sequence[Request], window: int, position_offset: int = 0) -> Tokens:
        """Return tokens [requests, window] sampled after 0 .. window - 1 drafts.

        position_offset: added to the positions, so that the same seeds give other noise.
        """
        rows = [RowSpec.of(request) for request in requests]
        sample = partial(
            sample_rows, rows=rows, window=window, offset=position_offset, context=self.context
        )
        return executor_of(self.llm.engine).collective_rpc(sample)


@one_thread()
@torch.inference_mode()
def sample_rows(
    worker: Worker, rows: Sequence[RowSpec], window: int, offset: int, context: SamplingContext
) -> Tokens:
    """Return tokens [rows, window] that one rank's sampler samples in a context."""
    table = worker.table
    device = worker.plan.device
    context_len = len(context.prompt) + len(context.output)
    drafts = torch.tensor(context.drafts[: window - 1], dtype=torch.int64, device=device)
    answer = torch.tensor(context.output, dtype=torch.int64, device=device)
    sampled = []
    for first in range(0, len(rows), ROWS):
        batch = rows[first : first + ROWS]
        for row, spec in enumerate(batch, 1):
            write_row(table, row, spec, 0)
            table.tokens[row, len(context.prompt) : context_len] = answer
            table.tokens[row, context_len : context_len + window - 1] = drafts
            table.sampling.counts[row].index_add_(0, answer, torch.ones_like(answer).int())
        row_ids = torch.arange(1, len(batch) + 1, device=device)
        positions = context_len + offset + torch.arange(window, device=device)
        logits = context.raw_logits.to(device).expand(len(batch), window, -1).contiguous()
        positions = positions.expand(len(batch), -1).contiguous()
        draft_rows = drafts.expand(len(batch), -1).contiguous()
        sampled.append(worker.program.sampler.sample(logits, positions, draft_rows, row_ids).cpu())
    return torch.cat(sampled).numpy()


def p_value(statistic: float, degrees: int) -> float:
    """Return the p-value of a chi-squared statistic."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if degrees else 1.0


def chi_squared(counts: Floats, expected: Floats) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; rare outcomes share a bin."""
    order = np.argsort(-expected)
    counts = counts[order]
    expected = expected[order]
    num_bins = max(int((expected >= MIN_EXPECTED_COUNT).sum()), 1)
    # The chi-squared approximation needs some expected counts in each bin.
    if expected[num_bins:].sum() < MIN_EXPECTED_COUNT:
        num_bins = max(num_bins - 1, 1)
    bins = [np.append(x[:num_bins], x[num_bins:].sum()) for x in (counts, expected)]
    used = bins[1] > 0
    statistic = float(((bins[0] - bins[1])[used] ** 2 / bins[1][used]).sum())
    return statistic, int(used.sum()) - 1


def wrong_distribution(tokens: Tokens, expected: Sequence[Floats]) -> str | None:
    """Compare tokens [N, W] with W expected distributions [V]; return the fault, or None."""
    total = 0.0
    total_degrees = 0
    for index, probabilities in enumerate(expected):
        counts = np.bincount(tokens[:, index], minlength=len(probabilities)).astype(np.float64)
        impossible = np.nonzero((counts > 0) & (probabilities == 0))[0]
        if len(impossible):
            return f"token {impossible[0]} was sampled after {index} drafts but has probability 0"
        statistic, degrees = chi_squared(counts, probabilities * len(tokens))
        total += statistic
        total_degrees += degrees
    return _fault_if_improbable(total, total_degrees, "the distribution")


def _fault_if_improbable(statistic: float, degrees: int, what: str) -> str | None:
    """Return a message if the statistic is too improbable, else None."""
    p = p_value(statistic, degrees)
    if p >= MIN_P_VALUE:
        return None
    return f"{what}: chi-squared {statistic:.0f} at {degrees} degrees of freedom, p {p:.1g}"


def token_classes(probabilities: Floats) -> NDArray[np.int64]:
    """Return the class [V] of each token, such that all classes are about equally probable."""
    mass = np.zeros(NUM_CLASSES)
    class_of_token = np.zeros(len(probabilities), np.int64)
    for token in np.argsort(-probabilities):
        class_of_token[token] = int(mass.argmin())
        mass[class_of_token[token]] += probabilities[token]
    return class_of_token


def wrong_pairs(first: Tokens, second: Tokens, probabilities: Floats, what: str) -> str | None:
    """Test two sequences of tokens for independence; return the fault, or None."""
    class_of_token = token_classes(probabilities)
    mass = np.bincount(class_of_token, weights=probabilities, minlength=NUM_CLASSES)
    pairs = class_of_token[first.ravel()] * NUM_CLASSES + class_of_token[second.ravel()]
    counts = np.bincount(pairs, minlength=NUM_CLASSES**2).astype(np.float64)
    expected: Floats = np.outer(mass, mass).ravel().astype(np.float64) * len(pairs)
    return _fault_if_improbable(*chi_squared(counts, expected), what)


def independence_tests(
    sampling: EngineSampler, num_samples: int
) -> Iterator[tuple[str, str | None]]:
    """Yield (name, fault) of the independence tests: positions, completions, rows and seeds."""
    context = sampling.context
    params = base_params(context)
    probabilities = token_probabilities(context, params, 0)
    requests = sampling.requests(params, num_samples)
    tokens = sampling.sample(requests, NUM_DRAFTS + 1)
    yield (
        "positions",
        wrong_pairs(tokens[:, :-1], tokens[:, 1:], probabilities, "neighbouring positions"),
    )
    yield (
        "completions",
        wrong_pairs(tokens[:-1], tokens[1:], probabilities, "completions of a request"),
    )
    # In the reverse order every request has another row.
    reversed_requests = list(reversed(requests))
    reordered = sampling.sample(reversed_requests, NUM_DRAFTS + 1)[::-1]
    row_fault = "the token depends on the row" if (reordered != tokens).any() else None
    yield "rows", row_fault
    yield LAST_TEST, wrong_seed_bits(sampling, params, probabilities)


def wrong_seed_bits(
    sampling: EngineSampler, params: SamplingParams, probabilities: Floats
) -> str | None:
    """Test whether seeds that differ in one of 64 bits give independent tokens."""
    seeds = [SEED, *(SEED ^ (1 << bit) for bit in range(SEED_BITS))]
    signed_seeds = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    requests = [
        r for seed in signed_seeds for r in sampling.requests(replace(params, seed=seed), 1)
    ]
    tokens = np.concatenate([sampling.sample(requests, 8, offset) for offset in (0, 8, 16)], axis=1)
    equal = tokens[1:] == tokens[:1]
    for bit in np.nonzero(equal.all(1))[0]:
        return f"bit {bit} of a seed changes nothing"
    chance = float((probabilities**2).sum())
    num_equal = float(equal.sum())
    expected = chance * equal.size
    statistic = (num_equal - expected) ** 2 / (expected * (1 - chance) * (1 + 24 * chance))
    return _fault_if_improbable(statistic, 1, "seeds that differ in one bit")


def find_context(plain: PlainRuns) -> SamplingContext:
    """Return a context with the flattest logits of the plain runs.

    Its output so far and its drafts consist of the most probable tokens.
    """
    runs = PlainRuns(plain.engine)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [tuple(p) for p in short_prompts(plain.llm)[:3]]
    for prompt in prompts:
        runs.answers(prompt, params)
    raw_logits = runs.flattest[0][1]
    likely_tokens = tuple(int(t) for t in torch.topk(raw_logits, NUM_DRAFTS + 3).indices)
    output = tuple(likely_tokens[i] for i in (0, 0, 2, 5, 8))
    eos_ids = frozenset(plain.llm.processor.eos_ids)
    return SamplingContext(
        raw_logits, prompts[0][:40], output, likely_tokens[1 : NUM_DRAFTS + 1], eos_ids
    )


def run_sampling(
    plain: PlainRuns,
    build: Callable[[Kind], CheckEngine],
    num_samples: int,
    report: Report,
    fail_fast: bool = False,
    progress: Progress = ignore_progress,
    deadline: Deadline = NO_DEADLINE,
) -> None:
    """Run the tests and add them to the report. num_samples: 0 for no tests."""
    if not num_samples:
        return
    progress("sampling: finding a context", 0, 0)
    setup = Setup(oracle_drafter.NAME, NUM_DRAFTS, SAMPLING, "none")
    context = find_context(plain)
    bad = context.raw_logits.isnan() | context.raw_logits.isposinf()
    if bad.any():
        token = int(bad.nonzero()[0])
        logit = float(context.raw_logits[token])
        report.fail(setup, "context", f"the logit of token {token} is {logit}")
        report.add(Tally(setup, 1, 1, 0.0, "finite logits"))
        return
    engine = build(Kind(oracle_drafter.NAME, NUM_DRAFTS, buckets=(ROWS,)))
    sampling = EngineSampler(engine.llm, context)
    started = time.monotonic()
    for done, (name, fault) in enumerate(_tests(sampling, num_samples), 1):
        progress(f"sampling: {name}", done, 0)
        if fault is not None:
            report.fail(setup, name, fault, "sampled tokens", name.partition(",")[0])
        seconds = round(time.monotonic() - started, 2)
        report.add(Tally(setup, 1, int(fault is not None), seconds, name))
        if fault is not None and fail_fast:
            return
        if deadline.passed and name != LAST_TEST:
            report.omit(SAMPLING, f"tests of distributions after the first {done}", TIME_UP)
            return
        started = time.monotonic()


def _tests(sampling: EngineSampler, num_samples: int) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each test, and its fault or None."""
    for name, params in parameter_cases(sampling.context).items():
        yield from _tests_of(sampling, name, params, num_samples)
    for name, factor in TEMPERATURES.items():
        logits = sampling.context.raw_logits * factor
        scaled = EngineSampler(sampling.llm, replace(sampling.context, raw_logits=logits))
        base = base_params(sampling.context)
        params = replace(base, temperature=base.temperature * factor)
        yield from _tests_of(scaled, name, params, num_samples)
    tied = replace(sampling.context, raw_logits=tied_logits(sampling.context.raw_logits))
    for name, params in tie_cases(tied).items():
        yield from _tests_of(EngineSampler(sampling.llm, tied), name, params, num_samples)
    yield from independence_tests(sampling, num_samples)


def _tests_of(
    sampling: EngineSampler, name: str, params: SamplingParams, num_samples: int
) -> Iterator[tuple[str, str | None]]:
    """Yield the tests of parameters, at a single position and in a window."""
    for mode, count, window in (
        ("alone", 2 * num_samples, 1),
        ("window", num_samples, NUM_DRAFTS + 1),
    ):
        expected = [token_probabilities(sampling.context, params, index) for index in range(window)]
        tokens = sampling.sample(sampling.requests(params, count), window)
        yield f"{name}, {mode}", wrong_distribution(tokens, expected)
