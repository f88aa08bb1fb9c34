"""Reference sampler in numpy and float64, for one position at a time.

Comparing runs cannot reveal a fault that all of them share. So this sampler judges the plain run's
tokens. It implements choices, bias, bad words, min_tokens, penalties, filters and noise from their
documentation, without code of the engine.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sampling_params import SamplingParams

Floats = NDArray[np.float64]
SCORE_TOLERANCE = 1e-4
"""Relative tolerance of a score: fp32 against float64."""
FP32_ROUNDING = 2.0**-21
"""Relative error of a score in fp32 after some operations."""
GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is chosen."""


@dataclass(frozen=True)
class Choices:
    """Allowed texts of an output in UTF-8.

    token_bytes: bytes of each token, empty for special tokens.
    """

    texts: tuple[bytes, ...]
    token_bytes: Sequence[bytes]

    def next_tokens(self, answer: Sequence[int], eos_ids: frozenset[int]) -> set[int]:
        """Return the tokens that continue a choice, and those that end a complete one."""
        prefix = b"".join(self.token_bytes[token] for token in answer)
        remainders = [text[len(prefix) :] for text in self.texts if text.startswith(prefix)]
        # One look-up per token of the vocabulary: the bytes of special tokens are no beginning.
        beginnings = {text[: index + 1] for text in remainders for index in range(len(text))}
        allowed = {token for token, text in enumerate(self.token_bytes) if text in beginnings}
        return allowed | (eos_ids if b"" in remainders else frozenset())


@dataclass(frozen=True)
class Thought:
    """Thought with which an answer begins.

    closing: token that ends it. budget: maximum tokens before that one, None for no limit.
    opening: token with which the answer may begin the thought; None if the prompt has begun it.
    """

    closing: int
    budget: int | None = None
    opening: int | None = None

    def content(self, answer: Sequence[int]) -> Sequence[int] | None:
        """Return the answer's tokens outside of the thought, None inside of it."""
        if self.opening is not None and list(answer[:1]) != [self.opening]:
            return answer
        if self.closing not in answer:
            return None
        return answer[list(answer).index(self.closing) + 1 :]


@dataclass(frozen=True)
class TokenContext:
    """Context of the next token.

    prompt, answer: tokens so far. eos_ids: end-of-sequence ids. choices: allowed texts of the
    content, None if all are allowed. thought: thought before the content. has_unknown_form: a
    grammar that this judge does not know bans tokens of the content.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    eos_ids: frozenset[int]
    choices: Choices | None = None
    thought: Thought | None = None
    has_unknown_form: bool = False

    @property
    def content(self) -> Sequence[int] | None:
        """Return the tokens of the content so far, None inside of a thought."""
        return self.answer if self.thought is None else self.thought.content(self.answer)

    def allowed(self) -> set[int] | None:
        """Return the tokens that the thought's budget or the choices allow; None for all."""
        content = self.content
        if content is None:
            assert self.thought is not None
            budget = self.thought.budget
            is_used_up = budget is not None and len(self.answer) >= budget
            return {self.thought.closing} if is_used_up else None
        if self.choices is None:
            return None
        allowed = self.choices.next_tokens(content, self.eos_ids)
        opening = None if self.thought is None else self.thought.opening
        return allowed if self.answer or opening is None else allowed | {opening}

    def forbidden_ends(self) -> frozenset[int]:
        """Return the end-of-sequence ids that are forbidden inside of a thought.

        Where the content needs a form, an answer that ends there would lack it.
        """
        if self.content is not None or not (self.choices or self.has_unknown_form):
            return frozenset()
        may_be_empty = self.choices is not None and b"" in self.choices.texts
        return frozenset() if may_be_empty else self.eos_ids


def masked_logits(raw: Floats, context: TokenContext, params: SamplingParams) -> Floats:
    """Apply choices, bias, bad words, min_tokens and penalties to raw logits [V], in this order."""
    logits = raw.astype(np.float64)
    permitted = context.allowed()
    if permitted is not None:
        chosen = np.full_like(logits, -np.inf)
        chosen[list(permitted)] = 0.0
        logits = logits + chosen
    logits[list(context.forbidden_ends())] = -np.inf
    if params.allowed_token_ids is not None:
        allowed = np.full_like(logits, -np.inf)
        allowed[list(params.allowed_token_ids)] = 0.0
        logits = logits + allowed
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    history = [*context.prompt, *context.answer]
    for word in params.bad_words_ids or ():
        *leading, last = word
        if history[len(history) - len(leading) :] == leading:
            logits[last] = -np.inf
    if len(context.answer) < params.min_tokens:
        logits[list(context.eos_ids | set(params.stop_token_ids or ()))] = -np.inf
    counts = Counter(context.answer)
    for token in {*context.prompt, *context.answer} if params.repetition_penalty != 1 else ():
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def filter_mask(scores: Floats, params: SamplingParams, tolerance: float) -> NDArray[np.bool_]:
    """Return the mask [V] of min_p, top_k and top_p for scores divided by the temperature.

    tolerance: slack at the bounds; above 0 it keeps doubtful tokens, below 0 it drops them.
    """
    keep = scores > -np.inf
    if not keep.any():
        return keep
    # The likeliest token always stays, so a filter never bans all tokens.
    is_top = scores == scores.max()
    if params.min_p > 0:
        floor = scores.max() + np.log(params.min_p)
        keep &= is_top | (scores >= floor - _slack(scores, tolerance))
    if 0 < params.top_k < len(scores):
        ordered = np.sort(np.where(keep, scores, -np.inf))
        bounds = scores + _slack(scores, tolerance)
        larger = len(scores) - np.searchsorted(ordered, bounds, side="right")
        if tolerance < 0:
            # Equal scores stay equal, so that all tokens that tie with the last one are kept.
            larger -= np.searchsorted(ordered, scores, side="right")
            larger += np.searchsorted(ordered, scores, side="left")
        keep &= is_top | (larger < params.top_k)
    if params.top_p < 1:
        before = _mass_before(np.where(keep, scores, -np.inf), tolerance)
        keep &= (before == 0) | (before < params.top_p + tolerance)
    return keep


def _slack(scores: Floats, tolerance: float) -> Floats:
    """Return the slack [V] of comparisons with each score: `tolerance`, and its rounding in fp32.

    Scores at low temperatures are large, so their rounding is larger than the tolerance. Without a
    tolerance there is no slack.
    """
    if tolerance == 0:
        return np.zeros_like(scores)
    finite = np.where(np.isfinite(scores), scores, 0.0)
    return tolerance + np.copysign(FP32_ROUNDING * np.abs(finite), tolerance)


def _mass_before(scores: Floats, tolerance: float) -> Floats:
    """Return the probability [V] of the tokens that precede each one in the order of top_p.

    Larger scores precede smaller ones, and of equal scores the smaller id. Rounding may exchange
    tokens whose scores differ by the slack: with a tolerance above 0 such tokens do not precede,
    below 0 they do.
    """
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    ascending = -descending
    slack = _slack(descending, tolerance)
    weights = np.exp(descending - descending[0])
    mass = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
    if tolerance > 0:
        begin_of_equal = np.searchsorted(ascending, ascending, side="left")
        num_larger = np.searchsorted(ascending, ascending - slack, side="left")
        preceding = mass[num_larger] + mass[:-1] - mass[begin_of_equal]
    else:
        end_of_equal = np.searchsorted(ascending, ascending, side="right")
        num_not_smaller = np.searchsorted(ascending, ascending - slack, side="right")
        preceding = mass[:-1] + mass[num_not_smaller] - mass[end_of_equal]
    before = np.empty_like(preceding)
    before[order] = preceding
    return before


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply fmix32 of MurmurHash3 to 32-bit numbers."""
    # The product of two 32-bit numbers has 64 bits before it is cut.
    low = np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x85EBCA6B)) & low
    x = x ^ (x >> np.uint64(13))
    x = (x * np.uint64(0xC2B2AE35)) & low
    return x ^ (x >> np.uint64(16))


def noise(seed: int, position: int, vocab: int) -> Floats:
    """Return standard Gumbel noise [V] of a 64-bit seed at an absolute position."""
    bits = seed % 2**64
    key = _mix(np.array([bits % 2**32 ^ 0x9E3779B9], np.uint64))
    key = _mix(key ^ np.uint64(bits // 2**32))
    key = _mix(key ^ np.uint64(position))
    random_ints = _mix(_mix(np.arange(vocab, dtype=np.uint64) ^ key) ^ key) // np.uint64(512)
    # 0.5 keeps the uniform number away from 0 and 1, where the logarithms are infinite.
    return -np.log(-np.log((random_ints.astype(np.float64) + 0.5) / 2**23))


def relative_gap(
    raw: Floats, token: int, context: TokenContext, params: SamplingParams, seed: int
) -> float:
    """Return the relative difference of a token's score to the best one, 0 for the best.

    Of equal logits with equal scores only the first may be the best. If the parameters allow no
    token, every token is accepted.
    """
    scores = masked_logits(raw, context, params)
    certain = scores > -np.inf
    possible = certain
    if not certain.any():
        return 0.0
    if params.temperature >= GREEDY_BELOW:
        scores = scores / params.temperature
        possible, certain = (
            filter_mask(scores, params, tolerance)
            for tolerance in (SCORE_TOLERANCE, -SCORE_TOLERANCE)
        )
        scores = scores + noise(seed, len(context.prompt) + len(context.answer), len(scores))
    # A token may pass the loose filter, but the best score is that of the strict one: a token that
    # only rounding keeps or drops is no fault.
    if not possible[token]:
        return float("inf")
    if not certain.any():
        return 0.0  # rounding decides which of the likeliest tokens stay
    best = scores[certain].max()
    equal = (scores == scores[token]) & (raw == raw[token])
    if scores[token] == best and int(equal.argmax()) != token:
        return float("inf")
    return float(max(best - scores[token], 0.0) / (1.0 + abs(best)))


def wrong_token(
    raw: Floats, token: int, context: TokenContext, params: SamplingParams, seed: int
) -> str | None:
    """Return what is wrong with a token at this position, or None."""
    # An unknown form may allow an empty content, so that the answer may end inside of the thought.
    ends_thought = context.content is None and token in context.eos_ids
    if context.has_unknown_form and (context.content is not None or ends_thought):
        return None
    gap = relative_gap(raw, token, context, params, seed)
    if gap <= SCORE_TOLERANCE:
        return None
    return f"token {token} is not the one that the logits and parameters give (off by {gap:.2g})"


def may_allow_no_token(context: TokenContext, params: SamplingParams, vocab: int) -> bool:
    """Return whether the parameters allow no token, or may allow none together with a form."""
    permitted = masked_logits(np.zeros(vocab), context, params) > -np.inf
    if not permitted.any():
        return True
    return context.has_unknown_form and context.content is not None and not permitted.all()


def wrong_form(text: str, regex: str | None, schema: object) -> str | None:
    """Return what is wrong with a complete content, or None.

    regex: one in the common syntax of re. schema: JSON schema of an object of the content, which
    has to be parsed; its required names must be there.
    """
    if regex is not None:
        return None if re.fullmatch(regex, text) else f"the text {text!r} does not match {regex}"
    if not isinstance(schema, dict):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return f"the text {text!r} is not JSON"
    missing = set(schema.get("required", ())) - set(value)
    return f"the text {text!r} lacks {sorted(missing)}" if missing else None


def wrong_end(
    tokens: Sequence[int],
    ending: tuple[str | None, int | str | None],
    eos_ids: frozenset[int],
    params: SamplingParams,
    max_output_tokens: int,
    may_fail: bool = False,
) -> str | None:
    """Return what is wrong with an output's ending, or None.

    may_fail: the output may end with an error, since no token may be allowed after its last one.
    """
    expected: tuple[str | None, int | None] = (None, None)
    for index, token in enumerate(tokens):
        if expected[0] is not None:
            return f"token {index} came after the end"
        if index >= params.min_tokens:
            if token in (params.stop_token_ids or ()):
                expected = "stop", token
            elif token in eos_ids and not params.ignore_eos:
                expected = "stop", None
        if expected[0] is None and index + 1 == max_output_tokens:
            expected = "length", None
    # The text decides about a stop string; this judge sees tokens only.
    if isinstance(ending[1], str):
        return None
    if may_fail and expected[0] is None and ending == ("error", None):
        return None
    return None if expected == ending else f"it ended with {ending} instead of {expected}"


def wrong_logprobs(
    raw: Floats, token: int, entry: dict[int, tuple[float, int]], num_logprobs: int
) -> str | None:
    """Return what is wrong with the log-probabilities and ranks at a position, or None."""
    max_logit = raw.max()
    scores = raw - max_logit - np.log(np.exp(raw - max_logit).sum())
    if token not in entry or len(entry) not in (num_logprobs, num_logprobs + 1):
        return f"logprobs of {sorted(entry)} for token {token} and the {num_logprobs} likeliest"
    for entry_token, (value, rank) in entry.items():
        expected = float(scores[entry_token])
        if abs(value - expected) > SCORE_TOLERANCE * (1 + abs(expected)):
            return f"logprob {value} of token {entry_token} instead of {expected}"
        tolerance = SCORE_TOLERANCE * (1 + abs(expected))
        other_scores = np.delete(scores, entry_token)
        min_rank, max_rank = (
            int((other_scores > expected + margin).sum()) + 1 for margin in (tolerance, -tolerance)
        )
        if not min_rank <= rank <= max_rank:
            return f"rank {rank} of token {entry_token} instead of {min_rank}"
        if entry_token != token and rank > num_logprobs:
            return f"token {entry_token} of rank {rank} among the {num_logprobs} likeliest"
    return None
