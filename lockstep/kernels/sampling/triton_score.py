# mypy: ignore-errors
"""The scores of one line's tokens, at any places of it.

Scores are made of the logits wherever they are read, never kept: elementwise fp32, so that a token
has one score however the line is cut.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lockstep.kernels.sampling import BAD_WORDS, BIAS, MIN_TOKENS, NOISE, PENALTIES

USES_BIAS, USES_PENALTIES = tl.constexpr(BIAS), tl.constexpr(PENALTIES)
USES_MIN_TOKENS, USES_BAD_WORDS = tl.constexpr(MIN_TOKENS), tl.constexpr(BAD_WORDS)
USES_NOISE = tl.constexpr(NOISE)


class Parameters(NamedTuple):
    """The tensors of lockstep.kernels.sampling.SamplingState, in its order."""

    flags: Any
    temperature: Any
    top_p: Any
    min_p: Any
    repetition: Any
    presence: Any
    frequency: Any
    top_k: Any
    seed: Any
    bias: Any
    counts: Any
    in_prompt: Any
    min_position: Any
    stop_ids: Any
    bad_words: Any


class Batch(NamedTuple):
    """The other tensors that sample is given; kept: None, or the token of each place of a line."""

    logits: Any
    positions: Any
    drafts: Any
    row_ids: Any
    history: Any
    kept: Any


class Line(NamedTuple):
    """One line of a batch, number `at`, and its row with its flags.

    Sizes: queries and vocab of a line of logits; tokens of a row's masks, length of its history;
    stops, words, longest and lanes: stop ids, bad words, the tokens of one, rounded up. A line is
    made where it is handed on: under a name Triton would take its sizes for tensors.
    """

    batch: Any
    of: Any
    at: Any
    row: Any
    use: Any
    queries: Any
    length: Any
    tokens: Any
    vocab: Any
    stops: Any
    words: Any
    longest: Any
    lanes: Any


@triton.jit
def _ban_words(x, ids, line):
    """-inf for the last token of each word whose other tokens stand in front of the position."""
    L, history = line.longest, line.batch.history + line.row * line.length
    lane, position = tl.arange(0, line.lanes), tl.load(line.batch.positions + line.at)
    for i in range(line.words):
        word = line.of.bad_words + (line.row * line.words + i) * L
        last = tl.load(word + L - 1)
        back = position - (L - 1) + lane
        prefix = tl.load(word + lane, mask=lane < L - 1, other=-1)
        used = prefix >= 0
        seen = tl.load(history + tl.maximum(back, 0), mask=lane < L - 1, other=-1)
        count = tl.sum(used.to(tl.int64), 0)
        wrong = tl.sum((used & (seen != prefix)).to(tl.int64), 0)
        if (last >= 0) & (wrong == 0) & (position >= count):
            x = tl.where(ids == last, float("-inf"), x)
    return x


@triton.jit
def _ban_stops(x, ids, line):
    """-inf for the stop ids in front of the row's min_position."""
    if tl.load(line.batch.positions + line.at) < tl.load(line.of.min_position + line.row):
        for i in range(line.stops):
            stop = tl.load(line.of.stop_ids + line.row * line.stops + i)
            x = tl.where(ids == stop, float("-inf"), x)
    return x


@triton.jit
def _penalised(x, ids, live, line):
    """By the row's tokens and the drafts in front of the line's position."""
    of, masks = line.of, line.row * line.tokens + ids
    n = tl.load(of.counts + masks, mask=live, other=0)
    drafts = line.batch.drafts + line.at // line.queries * (line.queries - 1)
    for i in range((line.at % line.queries).to(tl.int32)):
        n += (ids == tl.load(drafts + i)).to(tl.int32)
    seen = (n > 0) | (tl.load(of.in_prompt + masks, mask=live, other=0) != 0)
    repetition = tl.zeros_like(x) + tl.load(of.repetition + line.row)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - tl.load(of.frequency + line.row) * n.to(tl.float32)
    return x - tl.where(n > 0, tl.load(of.presence + line.row), 0.0)


@triton.jit
def tokens_at(line, places, live):
    """The tokens at these places of a line."""
    if line.batch.kept is not None:
        places = tl.load(line.batch.kept + places, mask=live, other=0).to(tl.int32)
    return places


@triton.jit
def scores_at(line, places, live):
    """The scores of the tokens there, before filters and noise; -inf where not live; inf, whatever
    the row asks for, where the logit is NaN or inf: so the line's largest score tells."""
    ids, logits = tokens_at(line, places, live), line.batch.logits + line.at * line.vocab
    x = tl.load(logits + places, mask=live, other=float("-inf")).to(tl.float32)
    sound = x < float("inf")
    if line.use & USES_BIAS:
        x += tl.load(line.of.bias + line.row * line.tokens + ids, mask=live, other=0.0)
    if line.use & USES_BAD_WORDS:
        x = _ban_words(x, ids, line)
    if line.use & USES_MIN_TOKENS:
        x = _ban_stops(x, ids, line)
    if line.use & USES_PENALTIES:
        x = _penalised(x, ids, live, line)
    if line.use & USES_NOISE:
        x = tl.div_rn(x, tl.zeros_like(x) + tl.load(line.of.temperature + line.row))
    return tl.where(sound, x, float("inf"))


@triton.jit
def _mix(x):
    """murmur3's fmix32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_at(line, places, live):
    """lockstep.kernels.sampling.gumbel of the tokens there."""
    ids, zero = tokens_at(line, places, live), tl.zeros_like(places).to(tl.uint32)
    seed, position = tl.load(line.of.seed + line.row), tl.load(line.batch.positions + line.at)
    key = _mix((zero + seed.to(tl.uint32)) ^ 0x9E3779B9)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position.to(tl.uint32))
    bits = _mix(_mix(key ^ ids.to(tl.uint32)) ^ key) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))
