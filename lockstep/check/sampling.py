"""The sampling section: drawn tokens against the distribution that the parameters ask for.

Tokens are drawn by the engine's own sampler out of one row of raw logits of a plain run: seed by
seed, at a position alone and at all positions of a window behind drafts. What they must be
distributed like is computed in float64 (lockstep.check.naive), without noise. Seeds are fixed, so a
run gives the same figures each time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.check import answer_oracle, naive
from lockstep.check.harness import CheckEngine
from lockstep.check.matrix import SAMPLING, Setup
from lockstep.check.plain import PlainRuns
from lockstep.check.report import Report, Tally
from lockstep.check.world import Kind
from lockstep.example_prompts import short_prompts
from lockstep.kernels.threads import one_thread
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import RowSpec
from lockstep.worker.executor import worker_of
from lockstep.worker.rows import write_row

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
DRAFTS = 7
ROWS = 16
"""Drawn at once."""
LEAST = 1e-6
"""A sample that is less probable than this is a failure."""
SEED = 2**40 + 12345
EXPECTED = 5.0
"""Least expected count of a bin of a chi-squared test."""
CLASSES = 4
BITS = 64


@dataclass(frozen=True)
class Context:
    """What is drawn from: raw logits [V], the prompt, the answer so far, and the drafts behind."""

    raw: Tensor
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    drafts: tuple[int, ...]
    ends: frozenset[int]

    def place(self, window_index: int) -> naive.Place:
        """The place of the token behind so many drafts."""
        return naive.Place(self.prompt, self.answer + self.drafts[:window_index], self.ends)


def usual(context: Context) -> SamplingParams:
    """No parameter but a temperature at which neither few tokens nor very many share the chances:
    two draws agree in one of 5 to 25 times."""
    params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=64, detokenize=False)
    for _ in range(40):
        agree = float((shares(context, params, 0) ** 2).sum())
        if 0.04 <= agree <= 0.2:
            break
        factor = 1.15 if agree > 0.2 else 0.85
        params = replace(params, temperature=params.temperature * factor)
    return params


def cases(context: Context) -> dict[str, SamplingParams]:
    """Every parameter that changes the distribution, by name, and all at once.

    Its tokens are the likeliest, so that each parameter matters.
    """
    likely = [int(t) for t in torch.topk(context.raw, 8).indices]
    base = usual(context)
    heat = base.temperature
    before = context.answer[-1]
    alone: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.7 * heat},
        "top_k": {"top_k": 4},
        "top_p": {"top_p": 0.8},
        "top_p and presence_penalty": {"top_p": 0.5, "presence_penalty": 2.0},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.5},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "presence_penalty": {"presence_penalty": -1.5},
        "logit_bias": {"logit_bias": {likely[0]: -2.0, likely[3]: 2.0}},
        "allowed_token_ids": {"allowed_token_ids": likely[1:6]},
        "bad_words": {"bad_words_ids": [[likely[0]], [before, likely[1]]]},
        "min_tokens": {"min_tokens": len(context.answer) + 3, "stop_token_ids": likely[:2]},
    }
    together = {
        "temperature": 1.3 * heat, "top_k": 200, "top_p": 0.95, "min_p": 0.001,
        "repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.5,
        "logit_bias": {likely[2]: 1.0}, "bad_words_ids": [[likely[1]]],
    }  # fmt: skip
    return {
        name: _decided(replace(base, **given), context)
        for name, given in {"no parameter": {}, **alone, "all together": together}.items()
    }


def _decided(params: SamplingParams, context: Context) -> SamplingParams:
    """The parameters, moved a little until no token stands on a filter's edge by rounding."""
    for _ in range(50):
        masked = [naive.masked(context.raw.numpy(), context.place(q), params) for q in range(8)]
        if not any(_doubtful(scores / params.temperature, params) for scores in masked):
            return params
        if params.top_p < 1:
            params = replace(params, top_p=params.top_p - 0.003)
        if params.min_p > 0:
            params = replace(params, min_p=params.min_p * 0.97)
        if params.top_k > 0:
            params = replace(params, top_k=params.top_k + 1)
    return params


def _doubtful(scores: Floats, params: SamplingParams) -> bool:
    """Whether a token of scores [V] stands so near a filter's edge that rounding decides."""
    most, least = (naive.kept(scores, params, edge) for edge in (naive.CLOSE, -naive.CLOSE))
    return not np.array_equal(most, least)


def shares(context: Context, params: SamplingParams, index: int) -> Floats:
    """The probabilities [V] of the token behind `index` drafts."""
    x = naive.masked(context.raw.numpy(), context.place(index), params) / params.temperature
    x = np.where(naive.kept(x, params, 0.0), x, -np.inf)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


class Sampling:
    """Draws with the sampler of one engine."""

    def __init__(self, llm: LLM, context: Context) -> None:
        self.llm = llm
        self.context = context

    def requests(self, params: SamplingParams, count: int) -> list[Request]:
        """So many completions of one request; their seeds are what the product makes of them."""
        prompt = {"prompt_token_ids": list(self.context.prompt)}
        found = []
        for first in range(0, count, 128):
            many = replace(params, n=min(128, count - first), seed=(params.seed or 0) + first)
            found += self.llm.processor.requests(f"draw-{first}", prompt, many)
        return found

    @one_thread()
    @torch.inference_mode()
    def draw(self, requests: Sequence[Request], window: int, ahead: int = 0) -> Tokens:
        """[requests, window]: the token of each behind 0 .. window - 1 drafts; ahead: how much
        further on in the text."""
        runner = worker_of(self.llm.engine)
        context = self.context
        table = runner.table
        device = runner.plan.device
        known = len(context.prompt) + len(context.answer)
        drafts = torch.tensor(context.drafts[: window - 1], dtype=torch.int64, device=device)
        answer = torch.tensor(context.answer, dtype=torch.int64, device=device)
        found = []
        for first in range(0, len(requests), ROWS):
            batch = requests[first : first + ROWS]
            for row, request in enumerate(batch, 1):
                write_row(table, row, RowSpec.of(request), 0)
                table.tokens[row, len(context.prompt) : known] = answer
                table.tokens[row, known : known + window - 1] = drafts
                table.sampling.counts[row].index_add_(0, answer, torch.ones_like(answer).int())
            rows = torch.arange(1, len(batch) + 1, device=device)
            places = known + ahead + torch.arange(window, device=device)
            logits = context.raw.to(device).expand(len(batch), window, -1).contiguous()
            places = places.expand(len(batch), -1).contiguous()
            given = drafts.expand(len(batch), -1).contiguous()
            found.append(runner.program.sampler.sample(logits, places, given, rows).cpu())
        return torch.cat(found).numpy()


def improbable(statistic: float, freedom: int) -> float:
    """How probable so large a chi-squared is."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


def chi_squared(counts: Floats, expected: Floats) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare outcomes are counted together."""
    order = np.argsort(-expected)
    counts = counts[order]
    expected = expected[order]
    alone = max(int((expected >= EXPECTED).sum()), 1)
    if expected[alone:].sum() < EXPECTED:
        alone = max(alone - 1, 1)
    bins = [np.append(x[:alone], x[alone:].sum()) for x in (counts, expected)]
    used = bins[1] > 0
    statistic = float(((bins[0] - bins[1])[used] ** 2 / bins[1][used]).sum())
    return statistic, int(used.sum()) - 1


def wrong_distribution(tokens: Tokens, due: Sequence[Floats]) -> str | None:
    """tokens [N, W] drawn, due: W distributions [V] -> what is wrong, or None."""
    total = 0.0
    freedom = 0
    for index, share in enumerate(due):
        counts = np.bincount(tokens[:, index], minlength=len(share)).astype(np.float64)
        never = np.nonzero((counts > 0) & (share == 0))[0]
        if len(never):
            return f"token {never[0]} was drawn behind {index} drafts and may not be"
        statistic, degrees = chi_squared(counts, share * len(tokens))
        total += statistic
        freedom += degrees
    return _if_improbable(total, freedom, "the distribution")


def _if_improbable(statistic: float, freedom: int, what: str) -> str | None:
    """What is wrong with a chi-squared of so many degrees of freedom, or None."""
    probable = improbable(statistic, freedom)
    if probable >= LEAST:
        return None
    return f"{what}: chi-squared {statistic:.0f} at {freedom} degrees of freedom, p {probable:.1g}"


def classes(share: Floats) -> NDArray[np.int64]:
    """A class [V] of each token, so that all are about equally probable."""
    mass = np.zeros(CLASSES)
    found = np.zeros(len(share), np.int64)
    for token in np.argsort(-share):
        found[token] = int(mass.argmin())
        mass[found[token]] += share[token]
    return found


def wrong_pairs(left: Tokens, right: Tokens, share: Floats, what: str) -> str | None:
    """Whether tokens that have nothing to do with each other, all of one distribution, do."""
    kind = classes(share)
    mass = np.bincount(kind, weights=share, minlength=CLASSES)
    pairs = kind[left.ravel()] * CLASSES + kind[right.ravel()]
    counts = np.bincount(pairs, minlength=CLASSES**2).astype(np.float64)
    expected: Floats = np.outer(mass, mass).ravel().astype(np.float64) * len(pairs)
    return _if_improbable(*chi_squared(counts, expected), what)


def independence(sampling: Sampling, draws: int) -> Iterator[tuple[str, str | None]]:
    """Positions, rows, the n of a request, and seeds that differ in a bit, each by name."""
    context = sampling.context
    params = usual(context)
    share = shares(context, params, 0)
    requests = sampling.requests(params, draws)
    tokens = sampling.draw(requests, DRAFTS + 1)
    yield "positions", wrong_pairs(tokens[:, :-1], tokens[:, 1:], share, "neighbouring positions")
    yield "completions", wrong_pairs(tokens[:-1], tokens[1:], share, "completions of a request")
    order = list(reversed(requests))
    other = sampling.draw(order, DRAFTS + 1)[::-1]
    same = "another row gives another token" if (other != tokens).any() else None
    yield "rows", same
    yield "seeds", wrong_bits(sampling, params, share)


def wrong_bits(sampling: Sampling, params: SamplingParams, share: Floats) -> str | None:
    """Whether seeds that differ in one of 64 bits give streams that agree too often."""
    seeds = [SEED, *(SEED ^ (1 << bit) for bit in range(BITS))]
    own = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    requests = [r for seed in own for r in sampling.requests(replace(params, seed=seed), 1)]
    tokens = np.concatenate([sampling.draw(requests, 8, ahead) for ahead in (0, 8, 16)], axis=1)
    agree = tokens[1:] == tokens[:1]
    for bit in np.nonzero(agree.all(1))[0]:
        return f"bit {bit} of a seed changes nothing"
    chance = float((share**2).sum())
    found = float(agree.sum())
    due = chance * agree.size
    statistic = (found - due) ** 2 / (due * (1 - chance) * (1 + 24 * chance))
    return _if_improbable(statistic, 1, "seeds that differ in one bit")


def find_context(plain: PlainRuns) -> Context:
    """The logits of the plain answers' flattest place, behind an answer and in front of drafts that
    are made of its likeliest tokens."""
    runs = PlainRuns(plain.engine)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [tuple(p) for p in short_prompts(plain.llm)[:3]]
    for prompt in prompts:
        runs.answers(prompt, params)
    raw = runs.flattest[0][1]
    likely = tuple(int(t) for t in torch.topk(raw, DRAFTS + 3).indices)
    answer = tuple(likely[i] for i in (0, 0, 2, 5, 8))
    ends = frozenset(plain.llm.processor.eos_ids)
    return Context(raw, prompts[0][:40], answer, likely[1 : DRAFTS + 1], ends)


def run_sampling(
    plain: PlainRuns,
    build: Callable[[Kind], CheckEngine],
    draws: int,
    report: Report,
    fail_fast: bool = False,
) -> None:
    """Runs the section and adds to the report. draws: seeds of a test, 0: no tests."""
    if not draws:
        return
    setup = Setup(answer_oracle.NAME, DRAFTS, SAMPLING, "none")
    context = find_context(plain)
    engine = build(Kind(answer_oracle.NAME, DRAFTS, buckets=(ROWS,)))
    sampling = Sampling(engine.llm, context)
    for name, what in _tests(sampling, draws):
        started = time.monotonic()
        if what is not None:
            report.fail(setup, name, what, "drawn tokens", name.partition(",")[0])
        seconds = round(time.monotonic() - started, 2)
        report.add(Tally(setup, 1, int(what is not None), seconds, name))
        if what is not None and fail_fast:
            return


def _tests(sampling: Sampling, draws: int) -> Iterator[tuple[str, str | None]]:
    """Every test's name, and what is wrong."""
    context = sampling.context
    for name, params in cases(context).items():
        for mode, count, window in (("alone", 2 * draws, 1), ("window", draws, DRAFTS + 1)):
            due = [shares(context, params, index) for index in range(window)]
            tokens = sampling.draw(sampling.requests(params, count), window)
            yield f"{name}, {mode}", wrong_distribution(tokens, due)
    yield from independence(sampling, draws)
