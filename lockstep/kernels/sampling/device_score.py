# mypy: ignore-errors
"""The scores of one logit row's tokens, at any places of it.

Scores are made of the logits wherever they are read, never kept: elementwise fp32, so that a token
has one score however the logit row is cut.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

from lockstep.kernels.sampling import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    COLUMNS,
    MIN_TOKENS,
    NOISE,
    PENALTIES,
    WORDS,
    SamplingState,
)

USES_BIAS = tl.constexpr(BIAS)
USES_PENALTIES = tl.constexpr(PENALTIES)
USES_MIN_TOKENS = tl.constexpr(MIN_TOKENS)
USES_BAD_WORDS = tl.constexpr(BAD_WORDS)
USES_NOISE = tl.constexpr(NOISE)
USES_ALLOWED = tl.constexpr(ALLOWED)
ROW_WORDS = tl.constexpr(WORDS)
SEED = tl.constexpr(COLUMNS["seed"])
FLAGS = tl.constexpr(COLUMNS["flags"])
TOP_K = tl.constexpr(COLUMNS["top_k"])
MIN_POSITION = tl.constexpr(COLUMNS["min_position"])
TEMPERATURE = tl.constexpr(COLUMNS["temperature"])
TOP_P = tl.constexpr(COLUMNS["top_p"])
MIN_P = tl.constexpr(COLUMNS["min_p"])
REPETITION = tl.constexpr(COLUMNS["repetition"])
PRESENCE = tl.constexpr(COLUMNS["presence"])
FREQUENCY = tl.constexpr(COLUMNS["frequency"])


Parameters = NamedTuple("Parameters", [(part.name, Any) for part in fields(SamplingState)])
"""The tensors of lockstep.kernels.sampling.SamplingState."""


class Batch(NamedTuple):
    """The other tensors that sample is given; kept: None, or the token of each place; allowed:
    None, or the bits of the tokens that may come."""

    logits: Any
    positions: Any
    drafts: Any
    row_ids: Any
    history: Any
    kept: Any
    allowed: Any


class LogitRow(NamedTuple):
    """The logits of one row at one position, number `at` of a batch, and that row with its flags.

    Sizes: queries of a row, vocab of a logit row; tokens of a row's masks, length of its history;
    stops, words, longest and lanes: stop ids, bad words, the tokens of one, rounded up. A LogitRow
    is made where it is handed on: under a name Triton would take its sizes for tensors.
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
def integer_of(state, row, COLUMN: tl.constexpr):
    """A row's parameter of 32 bits."""
    return tl.load(state.scalars + row * ROW_WORDS + COLUMN)


@triton.jit
def number_of(state, row, COLUMN: tl.constexpr):
    """A row's parameter in fp32."""
    return integer_of(state, row, COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _ban_words(x, ids, logit_row):
    """-inf for the last token of each word whose other tokens stand in front of the position."""
    L = logit_row.longest
    history = logit_row.batch.history + logit_row.row * logit_row.length
    lane = tl.arange(0, logit_row.lanes)
    position = tl.load(logit_row.batch.positions + logit_row.at)
    for i in range(logit_row.words):
        word = logit_row.of.bad_words + (logit_row.row * logit_row.words + i) * L
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
def _ban_stops(x, ids, logit_row):
    """-inf for the stop ids in front of the row's min_position."""
    if tl.load(logit_row.batch.positions + logit_row.at) < integer_of(
        logit_row.of, logit_row.row, MIN_POSITION
    ):
        for i in range(logit_row.stops):
            stop = tl.load(logit_row.of.stop_ids + logit_row.row * logit_row.stops + i)
            x = tl.where(ids == stop, float("-inf"), x)
    return x


@triton.jit
def _penalised(x, ids, live, logit_row):
    """By the row's tokens and the drafts in front of the logit row's position."""
    of = logit_row.of
    masks = logit_row.row * logit_row.tokens + ids
    n = tl.load(of.counts + masks, mask=live, other=0)
    drafts = logit_row.batch.drafts + logit_row.at // logit_row.queries * (logit_row.queries - 1)
    for i in range((logit_row.at % logit_row.queries).to(tl.int32)):
        n += (ids == tl.load(drafts + i)).to(tl.int32)
    seen = (n > 0) | (tl.load(of.in_prompt + masks, mask=live, other=0) != 0)
    repetition = tl.zeros_like(x) + number_of(of, logit_row.row, REPETITION)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - number_of(of, logit_row.row, FREQUENCY) * n.to(tl.float32)
    return x - tl.where(n > 0, number_of(of, logit_row.row, PRESENCE), 0.0)


@triton.jit
def _allowed_only(x, ids, live, logit_row):
    """-inf for the tokens whose bit is not set."""
    words = logit_row.batch.allowed + logit_row.at * ((logit_row.tokens + 31) // 32)
    word = tl.load(words + ids // 32, mask=live, other=0)
    return tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))


@triton.jit
def tokens_at(logit_row, places, live):
    """The tokens at these places of a logit row."""
    if logit_row.batch.kept is not None:
        places = tl.load(logit_row.batch.kept + places, mask=live, other=0).to(tl.int32)
    return places


@triton.jit
def scores_at(logit_row, places, live):
    """The scores of the tokens there, before filters and noise; -inf where not live; inf, whatever
    the row asks for, where the logit is NaN or inf: so the logit row's largest score tells."""
    ids = tokens_at(logit_row, places, live)
    logits = logit_row.batch.logits + logit_row.at * logit_row.vocab
    x = tl.load(logits + places, mask=live, other=float("-inf")).to(tl.float32)
    sound = x < float("inf")
    if logit_row.batch.allowed is not None:
        if logit_row.use & USES_ALLOWED:
            x = _allowed_only(x, ids, live, logit_row)
    if logit_row.use & USES_BIAS:
        x += tl.load(
            logit_row.of.bias + logit_row.row * logit_row.tokens + ids, mask=live, other=0.0
        )
    if logit_row.use & USES_BAD_WORDS:
        x = _ban_words(x, ids, logit_row)
    if logit_row.use & USES_MIN_TOKENS:
        x = _ban_stops(x, ids, logit_row)
    if logit_row.use & USES_PENALTIES:
        x = _penalised(x, ids, live, logit_row)
    if logit_row.use & USES_NOISE:
        x = tl.div_rn(x, tl.zeros_like(x) + number_of(logit_row.of, logit_row.row, TEMPERATURE))
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
def noise_at(logit_row, places, live):
    """lockstep.kernels.sampling.gumbel of the tokens there."""
    ids = tokens_at(logit_row, places, live)
    zero = tl.zeros_like(places).to(tl.uint32)
    position = tl.load(logit_row.batch.positions + logit_row.at)
    low = integer_of(logit_row.of, logit_row.row, SEED).to(tl.uint32, bitcast=True)
    high = integer_of(logit_row.of, logit_row.row, SEED + 1).to(tl.uint32, bitcast=True)
    key = _mix((zero + low) ^ 0x9E3779B9)
    key = _mix(key ^ high)
    key = _mix(key ^ position.to(tl.uint32))
    bits = _mix(_mix(key ^ ids.to(tl.uint32)) ^ key) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))
