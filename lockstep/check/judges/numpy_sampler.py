"""Reference sampler in numpy and float64, for one position at a time.

A fault that all runs share cannot be found by comparing them. So the plain run's tokens are judged
by this sampler. It implements choices, bias, bad words, min_tokens, penalties, filters and noise
from their documentation, without code of the engine.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.sampling_params import SamplingParams

Floats = NDArray[np.float64]
CLOSE = 1e-4
"""Relative tolerance of a score: fp32 against float64."""


@dataclass(frozen=True)
class Choices:
    """Allowed texts of an output in UTF-8. spelled: bytes of each token, empty for special ones."""

    texts: tuple[bytes, ...]
    spelled: Sequence[bytes]

    def next(self, answer: Sequence[int], ends: frozenset[int]) -> set[int]:
        """Return the tokens that continue a choice, and those that end a complete one."""
        said = b"".join(self.spelled[token] for token in answer)
        rests = [text[len(said) :] for text in self.texts if text.startswith(said)]
        found = set()
        for token, spelled in enumerate(self.spelled):
            if spelled and any(rest.startswith(spelled) for rest in rests):
                found.add(token)
        return found | (ends if b"" in rests else frozenset())


@dataclass(frozen=True)
class Place:
    """Position of a token: prompt, output tokens before it, end tokens, and allowed choices."""

    prompt: Sequence[int]
    answer: Sequence[int]
    ends: frozenset[int]
    choices: Choices | None = None


def masked(raw: Floats, place: Place, params: SamplingParams) -> Floats:
    """Apply choices, bias, bad words, min_tokens and penalties to raw logits [V], in this order."""
    x = raw.astype(np.float64)
    if place.choices is not None:
        chosen = np.full_like(x, -np.inf)
        chosen[list(place.choices.next(place.answer, place.ends))] = 0.0
        x = x + chosen
    if params.allowed_token_ids is not None:
        allowed = np.full_like(x, -np.inf)
        allowed[list(params.allowed_token_ids)] = 0.0
        x = x + allowed
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    history = [*place.prompt, *place.answer]
    for word in params.bad_words_ids or ():
        *front, last = word
        if history[len(history) - len(front) :] == front:
            x[last] = -np.inf
    if len(place.answer) < params.min_tokens:
        x[list(place.ends | set(params.stop_token_ids or ()))] = -np.inf
    counts = Counter(place.answer)
    for token in {*place.prompt, *place.answer} if params.repetition_penalty != 1 else ():
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token, count in counts.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def kept(x: Floats, params: SamplingParams, slack: float) -> NDArray[np.bool_]:
    """Return the mask [V] of min_p, top_k and top_p for scores divided by the temperature.

    slack: tolerance at the bounds; above 0 it keeps doubtful tokens, below 0 it drops them.
    """
    keep = x > -np.inf
    if not keep.any():
        return keep
    likeliest = x == x.max()
    if params.min_p > 0:
        keep &= likeliest | (x >= x.max() + np.log(params.min_p) - slack)
    if 0 < params.top_k < len(x):
        ordered = np.sort(np.where(keep, x, -np.inf))
        least = ordered[-params.top_k]
        next_one = ordered[-params.top_k - 1]
        keep &= likeliest | (x >= (least - slack if slack >= 0 else max(least, next_one - slack)))
    if params.top_p < 1:
        left = np.where(keep, x, -np.inf)
        weights = np.exp(left - left.max())
        order = np.argsort(-left, kind="stable")
        mass = np.cumsum(weights[order]) / weights.sum()
        inside = np.concatenate([[True], mass[:-1] < params.top_p + slack])
        keep &= np.isin(np.arange(len(x)), order[inside])
    return keep


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply fmix32 of MurmurHash3 to 32-bit numbers."""
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
    drawn = _mix(_mix(np.arange(vocab, dtype=np.uint64) ^ key) ^ key) // np.uint64(512)
    return -np.log(-np.log((drawn.astype(np.float64) + 0.5) / 2**23))


def missed_by(raw: Floats, token: int, place: Place, params: SamplingParams, seed: int) -> float:
    """Return the relative difference of a token's score to the best one, 0 for the best.

    If the parameters allow no token, every token is accepted.
    """
    x = masked(raw, place, params)
    sure = x > -np.inf
    maybe = sure
    if not sure.any():
        return 0.0
    if not params.greedy:
        x = x / params.temperature
        maybe, sure = (kept(x, params, slack) for slack in (CLOSE, -CLOSE))
        x = x + noise(seed, len(place.prompt) + len(place.answer), len(x))
    if not maybe[token]:
        return float("inf")
    best = x[sure].max()
    return float(max(best - x[token], 0.0) / (1.0 + abs(best)))


def wrong_token(
    raw: Floats, token: int, place: Place, params: SamplingParams, seed: int
) -> str | None:
    """Return what is wrong with a token at this position, or None."""
    missed = missed_by(raw, token, place, params, seed)
    if missed <= CLOSE:
        return None
    return f"token {token} is not the one that the logits and parameters give (off by {missed:.2g})"


def wrong_end(
    tokens: Sequence[int],
    ending: tuple[str | None, int | str | None],
    ends: frozenset[int],
    params: SamplingParams,
    room: int,
) -> str | None:
    """Return what is wrong with an output's ending, or None. room: maximum tokens of the output.

    An ending by a stop string is not judged here.
    """
    if isinstance(ending[1], str):
        return None
    due: tuple[str | None, int | None] = (None, None)
    for index, token in enumerate(tokens):
        if due[0] is not None:
            return f"token {index} came after the end"
        if index >= params.min_tokens:
            if token in (params.stop_token_ids or ()):
                due = "stop", token
            elif token in ends and not params.ignore_eos:
                due = "stop", None
        if due[0] is None and index + 1 == room:
            due = "length", None
    return None if due == ending else f"it ended with {ending} instead of {due}"


def wrong_logprobs(
    raw: Floats, token: int, entry: dict[int, tuple[float, int]], most: int
) -> str | None:
    """Return what is wrong with the log-probabilities and ranks at a position, or None."""
    peak = raw.max()
    scores = raw - peak - np.log(np.exp(raw - peak).sum())
    if token not in entry or len(entry) not in (most, most + 1):
        return f"logprobs of {sorted(entry)} for token {token} and the {most} likeliest"
    for given, (value, rank) in entry.items():
        due = float(scores[given])
        if abs(value - due) > CLOSE * (1 + abs(due)):
            return f"logprob {value} of token {given} instead of {due}"
        close = CLOSE * (1 + abs(due))
        others = np.delete(scores, given)
        least, last = (int((others > due + edge).sum()) + 1 for edge in (close, -close))
        if not least <= rank <= last:
            return f"rank {rank} of token {given} instead of {least}"
        if given != token and rank > most:
            return f"token {given} of rank {rank} among the {most} likeliest"
    return None
