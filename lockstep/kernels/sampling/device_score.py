# mypy: ignore-errors
"""Scores of tokens of one logit row, at any indices.

Scores are recomputed from logits wherever they are read, and not stored. They are elementwise in
fp32, so a token has one score however the logit row is split over CTAs.
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
"""Tensors of lockstep.kernels.sampling.SamplingState."""


class Batch(NamedTuple):
    """Other tensor arguments of sample. kept: token of each logit, or None for all tokens."""

    logits: Any
    positions: Any
    drafts: Any
    row_ids: Any
    history: Any
    kept: Any
    allowed: Any


class LogitRow(NamedTuple):
    """Logits of one row at one position.

    query: index of the logit row in the batch. state: parameters. row: row of the table. use: its
    flags. first: index, in the logits of all ranks, of the logit with index 0. Sizes: queries per
    row, length of a row's history, tokens of the vocabulary, pitch (logits from one row to the
    next), stops (stop ids), words (bad words), longest (tokens of a bad word), lanes (longest,
    rounded up to a power of 2).

    Construct a LogitRow inside of the call that takes it: if it were assigned to a variable, Triton
    would turn its constant sizes into tensors.
    """

    batch: Any
    state: Any
    query: Any
    row: Any
    use: Any
    queries: Any
    length: Any
    tokens: Any
    pitch: Any
    stops: Any
    words: Any
    longest: Any
    lanes: Any
    first: Any


@triton.jit
def integer_of(state, row, COLUMN: tl.constexpr):
    """Load a 32-bit integer parameter of a row."""
    return tl.load(state.scalars + row * ROW_WORDS + COLUMN)


@triton.jit
def number_of(state, row, COLUMN: tl.constexpr):
    """Load an fp32 parameter of a row."""
    return integer_of(state, row, COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _ban_words(x, ids, logit_row):
    """Ban the last token of each bad word whose other tokens precede the position."""
    L = logit_row.longest
    history = logit_row.batch.history + logit_row.row * logit_row.length
    lane = tl.arange(0, logit_row.lanes)
    position = tl.load(logit_row.batch.positions + logit_row.query)
    for i in range(logit_row.words):
        word = logit_row.state.bad_words + (logit_row.row * logit_row.words + i) * L
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
    """Ban the stop ids before the row's min_position."""
    if tl.load(logit_row.batch.positions + logit_row.query) < integer_of(
        logit_row.state, logit_row.row, MIN_POSITION
    ):
        for i in range(logit_row.stops):
            stop = tl.load(logit_row.state.stop_ids + logit_row.row * logit_row.stops + i)
            x = tl.where(ids == stop, float("-inf"), x)
    return x


@triton.jit
def _penalize(x, ids, live, logit_row):
    """Apply penalties by the row's counts and by the drafts before the position."""
    state = logit_row.state
    masks = logit_row.row * logit_row.tokens + ids
    n = tl.load(state.counts + masks, mask=live, other=0)
    drafts = logit_row.batch.drafts + logit_row.query // logit_row.queries * (logit_row.queries - 1)
    for i in range((logit_row.query % logit_row.queries).to(tl.int32)):
        n += (ids == tl.load(drafts + i)).to(tl.int32)
    seen = (n > 0) | (tl.load(state.in_prompt + masks, mask=live, other=0) != 0)
    repetition = tl.zeros_like(x) + number_of(state, logit_row.row, REPETITION)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - number_of(state, logit_row.row, FREQUENCY) * n.to(tl.float32)
    return x - tl.where(n > 0, number_of(state, logit_row.row, PRESENCE), 0.0)


@triton.jit
def _allowed_only(x, ids, live, logit_row):
    """Ban the tokens whose bit is not set in the mask."""
    words = logit_row.batch.allowed + logit_row.query * ((logit_row.tokens + 31) // 32)
    word = tl.load(words + ids // 32, mask=live, other=0)
    return tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))


@triton.jit
def tokens_at(logit_row, indices, live):
    """Return the token ids at these indices of a logit row."""
    indices += logit_row.first
    if logit_row.batch.kept is not None:
        indices = tl.load(logit_row.batch.kept + indices, mask=live, other=0).to(tl.int32)
    return indices


@triton.jit
def scores_at(logit_row, indices, live):
    """Return the scores at these indices, before filters and noise; -inf where not live."""
    logits = logit_row.batch.logits + logit_row.query * logit_row.pitch
    return scores_of(logit_row, logits + indices, indices, live)


@triton.jit
def scores_of(logit_row, logits, indices, live):
    """Return the scores of logits [...], which are pointers to the logits at these indices.

    A NaN or +inf logit gives +inf, even if its token is banned. So the largest score of a logit row
    shows that it has no token.
    """
    ids = tokens_at(logit_row, indices, live)
    x = tl.load(logits, mask=live, other=float("-inf")).to(tl.float32)
    sound = x < float("inf")
    if logit_row.batch.allowed is not None:
        if logit_row.use & USES_ALLOWED:
            x = _allowed_only(x, ids, live, logit_row)
    if logit_row.use & USES_BIAS:
        x += tl.load(
            logit_row.state.bias + logit_row.row * logit_row.tokens + ids, mask=live, other=0.0
        )
    if logit_row.use & USES_BAD_WORDS:
        x = _ban_words(x, ids, logit_row)
    if logit_row.use & USES_MIN_TOKENS:
        x = _ban_stops(x, ids, logit_row)
    if logit_row.use & USES_PENALTIES:
        x = _penalize(x, ids, live, logit_row)
    if logit_row.use & USES_NOISE:
        x = tl.div_rn(x, tl.zeros_like(x) + number_of(logit_row.state, logit_row.row, TEMPERATURE))
    return tl.where(sound, x, float("inf"))


@triton.jit
def _mix(x):
    """Apply murmur3's fmix32 to uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_at(logit_row, indices, live):
    """Return Gumbel noise at these indices: see lockstep.kernels.sampling.gumbel."""
    ids = tokens_at(logit_row, indices, live)
    zero = tl.zeros_like(indices).to(tl.uint32)
    position = tl.load(logit_row.batch.positions + logit_row.query)
    low = integer_of(logit_row.state, logit_row.row, SEED).to(tl.uint32, bitcast=True)
    high = integer_of(logit_row.state, logit_row.row, SEED + 1).to(tl.uint32, bitcast=True)
    key = _mix((zero + low) ^ 0x9E3779B9)
    key = _mix(key ^ high)
    key = _mix(key ^ position.to(tl.uint32))
    # 23 bits, so that (bits + 0.5) / 2^23 is exact in fp32 and in (0, 1): both logs are finite.
    bits = _mix(_mix(key ^ ids.to(tl.uint32)) ^ key) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))
