"""The numpy sampler agrees with the engine's, and detects wrong tokens, endings and logprobs."""

import math
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.check.judges import numpy_sampler
from lockstep.kernels.sampling import SamplingState, sample
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import RowSpec
from lockstep.worker.rows import write_sampling

V = 50
PROMPT = [3, 4, 5, 4]
ANSWER = [7, 8, 7]
EOS_IDS = frozenset({2})
RAW = np.random.default_rng(0).normal(size=V).astype(np.float32).astype(np.float64) * 2
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"seed": 2**40 + 5},
    {"seed": -1, "temperature": 0.6},
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"frequency_penalty": 2.0, "presence_penalty": -1.0},
    {"temperature": 0.0, "logit_bias": {1: 9.0, 2: -100.0}},
    {"allowed_token_ids": [1, 2, 9], "logit_bias": {5: 3.0}},
    {"bad_words_ids": [[8, 7, 11], [30], [5, 4, 7, 8, 7, 13]], "temperature": 0.0},
    {"min_tokens": 4, "stop_token_ids": [9, 10]},
    {"min_tokens": 3, "stop_token_ids": [9, 10]},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.2},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "temperature": 2.0},
)


def engines_token(raw: np.ndarray, params: SamplingParams, seed: int) -> int:
    state = SamplingState.empty(2, V, 20, (32, 8), "cpu")
    request = Request("r", PROMPT, params, eos_token_ids=EOS_IDS, seed=seed)
    write_sampling(state, 1, RowSpec.of(request), torch.tensor(PROMPT))
    for token in ANSWER:
        state.counts[1, token] += 1
    history = torch.zeros(2, 20, dtype=torch.int64)
    history[1, : len(PROMPT + ANSWER)] = torch.tensor(PROMPT + ANSWER)
    at = torch.tensor([[len(PROMPT + ANSWER)]])
    logits = torch.tensor(raw, dtype=torch.float32)[None, None]
    none = torch.empty(1, 0, dtype=torch.int64)
    return int(sample(logits, at, none, torch.tensor([1]), history, state))


@pytest.mark.parametrize("options", PARAMS, ids=str)
def test_reference_accepts_only_the_engines_token(options: dict[str, Any]) -> None:
    rng = random.Random(str(options))
    context = numpy_sampler.TokenContext(PROMPT, ANSWER, EOS_IDS)
    params = SamplingParams(**{"seed": 3, **options})
    for _ in range(20):
        raw = RAW[rng.sample(range(V), V)]
        seed = (params.seed or 0) ^ rng.randrange(2**60)
        token = engines_token(raw, params, seed)
        assert numpy_sampler.wrong_token(raw, token, context, params, seed) is None
        other_tokens = [t for t in range(V) if t != token]
        accepted = [
            t
            for t in other_tokens
            if numpy_sampler.wrong_token(raw, t, context, params, seed) is None
        ]
        assert len(accepted) <= 1, "at most one other token is as good, by rounding"


def test_ties_of_logits_choose_the_first_token() -> None:
    raw = np.zeros(V)
    raw[[7, 20, 30]] = 3.0
    context = numpy_sampler.TokenContext(PROMPT, [], EOS_IDS)
    greedy = SamplingParams(temperature=0.0)

    def accepted(params: SamplingParams) -> list[int]:
        tokens = (7, 20, 30)
        judged = (numpy_sampler.wrong_token(raw, t, context, params, 0) for t in tokens)
        return [t for t, fault in zip(tokens, judged, strict=True) if fault is None]

    assert accepted(greedy) == [7]
    # A bias makes the first one worse, so the second one wins.
    assert accepted(replace(greedy, logit_bias={7: -1.0})) == [20]


def kept_tokens(scores: Any, params: SamplingParams, slack: float) -> list[int]:
    """Return the tokens that min_p, top_k and top_p keep. slack: tolerance of filter_mask()."""
    kept: list[int] = numpy_sampler.filter_mask(scores, params, slack).nonzero()[0].tolist()
    return kept


def test_tokens_that_tie_with_the_last_of_top_k_are_kept() -> None:
    scores = np.arange(V, dtype=np.float64)
    scores[:10] = scores[40]
    params = SamplingParams(top_k=10)
    for tolerance in (numpy_sampler.SCORE_TOLERANCE, -numpy_sampler.SCORE_TOLERANCE):
        assert kept_tokens(scores, params, tolerance) == [*range(10), *range(40, V)]


def test_rounding_decides_between_tokens_at_the_end_of_top_k() -> None:
    tolerance = numpy_sampler.SCORE_TOLERANCE
    scores = np.arange(V, dtype=np.float64)
    scores[[3, 39]] = scores[40] - tolerance / 2
    params = SamplingParams(top_k=10)
    kept = partial(kept_tokens, scores, params)

    assert kept(tolerance) == [3, 39, *range(40, V)]
    assert kept(-tolerance) == [*range(41, V)], "tokens 3 and 39 may be before token 40"
    scores[40] += tolerance
    assert kept(-tolerance) == [*range(40, V)]


def test_rounding_decides_between_tokens_at_the_end_of_top_p() -> None:
    tolerance = numpy_sampler.SCORE_TOLERANCE
    scores = np.full(V, -40.0)
    scores[[3, 5, 9]] = (2.0, 1.0, 1.0 - tolerance / 2)
    params = SamplingParams(top_p=0.6)  # token 3 has 0.58
    kept = partial(kept_tokens, scores, params)

    assert kept(tolerance) == [3, 5, 9]
    assert kept(-tolerance) == [3], "token 9 may be before token 5"
    scores[9] = scores[5]
    assert kept(tolerance) == kept(-tolerance) == [3, 5], "of equal scores the first stays"
    scores[9] -= 3 * tolerance
    assert kept(tolerance) == kept(-tolerance) == kept(0.0) == [3, 5]


def test_rounding_decides_which_of_the_likeliest_tokens_stays() -> None:
    raw = np.full(V, -40.0)
    raw[[5, 9]] = (1.0 - numpy_sampler.SCORE_TOLERANCE / 2, 1.0)
    context = numpy_sampler.TokenContext(PROMPT, [], EOS_IDS)
    params = SamplingParams(top_p=0.3, seed=1)
    judged = [numpy_sampler.wrong_token(raw, token, context, params, 1) for token in range(V)]
    assert [token for token, fault in enumerate(judged) if fault is None] == [5, 9]


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("options", [{"top_p": 0.4}, {"top_k": 2}, {"min_p": 0.999999}], ids=str)
def test_logits_that_are_one_ulp_apart_raise_no_alarm(
    options: dict[str, Any], temperature: float
) -> None:
    """At temperature 1e-4 a score is 10,000 times a logit, and so is its rounding."""
    context = numpy_sampler.TokenContext(PROMPT, ANSWER, EOS_IDS)
    for seed in range(40):
        raw = RAW.astype(np.float32) - np.float32(30)
        raw[[11, 23, 37]] = [np.float32(15 + rank * 2**-20) for rank in (1, 0, 2)]
        params = SamplingParams(**options, temperature=temperature, seed=seed)
        token = engines_token(raw, params, seed)
        judged = raw.astype(np.float64)
        assert numpy_sampler.wrong_token(judged, token, context, params, seed) is None


def test_every_bit_of_a_seed_counts() -> None:
    base = numpy_sampler.noise(12345, 7, V)
    for bit in range(64):
        assert not np.allclose(numpy_sampler.noise(12345 ^ (1 << bit), 7, V), base)
    assert np.array_equal(numpy_sampler.noise(-1, 7, V), numpy_sampler.noise(2**64 - 1, 7, V))


@pytest.mark.parametrize(
    ("tokens", "ending", "options", "message"),
    [
        ([5, 6, 2], ("stop", None), {}, None),
        ([5, 6, 2], ("length", None), {"ignore_eos": True, "max_tokens": 3}, None),
        ([5, 2, 6], ("length", None), {"max_tokens": 3}, "token 2 came after the end"),
        ([5, 6], ("length", None), {"max_tokens": 3}, r"instead of \(None, None\)"),
        ([5, 9], ("stop", 9), {"stop_token_ids": [9], "min_tokens": 1}, None),
        ([5, 9], ("stop", 9), {"stop_token_ids": [9], "min_tokens": 2}, "instead of"),
        ([5, 9], ("stop", None), {"stop_token_ids": [9]}, r"instead of \('stop', 9\)"),
        ([5, 9], ("stop", "text"), {"max_tokens": 3}, None),
    ],
)
def test_ends(tokens: list[int], ending: Any, options: dict[str, Any], message: str | None) -> None:
    params = SamplingParams(**options)
    fault = numpy_sampler.wrong_end(tokens, ending, EOS_IDS, params, params.max_tokens or 0)
    if message is None:
        assert fault is None
    else:
        assert fault is not None
        assert re.search(message, fault)


def test_logprobs() -> None:
    scores = RAW - RAW.max() - math.log(float(np.exp(RAW - RAW.max()).sum()))
    order = [int(i) for i in np.argsort(-scores)]
    entry = {t: (float(scores[t]), rank + 1) for rank, t in enumerate(order[:3])}
    assert numpy_sampler.wrong_logprobs(RAW, order[0], entry, 3) is None
    last = order[-1]
    with_last = {**entry, last: (float(scores[last]), V)}
    assert numpy_sampler.wrong_logprobs(RAW, last, with_last, 3) is None
    for wrong in (
        {**entry, order[0]: (float(scores[order[0]]) + 0.01, 1)},
        {**entry, order[0]: (float(scores[order[0]]), 2)},
        {t: entry[t] for t in order[1:3]},
        {**{t: entry[t] for t in order[:2]}, last: (float(scores[last]), V)},
    ):
        assert numpy_sampler.wrong_logprobs(RAW, order[0], wrong, 3) is not None


@pytest.mark.parametrize(
    ("texts", "has_unknown_form", "forbids"),
    [((b"a",), False, True), ((b"a", b""), False, False), (None, True, True), (None, False, False)],
)
def test_answers_with_a_form_do_not_end_in_their_thought(
    texts: tuple[bytes, ...] | None, has_unknown_form: bool, forbids: bool
) -> None:
    choices = None if texts is None else numpy_sampler.Choices(texts, (b"a", b"b", b"", b""))
    thought = numpy_sampler.Thought(closing=2)
    context = numpy_sampler.TokenContext(
        (0,), (1,), frozenset({3}), choices, thought, has_unknown_form
    )
    raw = np.array([0.0, 1.0, 2.0, 9.0])
    params = SamplingParams(temperature=0.0)
    assert (numpy_sampler.wrong_token(raw, 2, context, params, 0) is None) == forbids
