"""sample in Triton: score, then choose; no sort, no host read, one line per position.

A position's flags are read on the device. Rows without flags go straight from their logits to the
argmax; only rows that filter leave their scores in memory. Largest values and counts are exact in any order; the one sum (top-p's mass) runs block by
block in one layout. Thresholds come from bisection over the ordered bits of a float.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.sampling import (
    BAD_WORDS,
    BIAS,
    FILTERS,
    MIN_TOKENS,
    NOISE,
    PENALTIES,
    SamplingState,
    sample,
)

SPAN, BLOCK, FILTER_BLOCK = 8192, 2048, 16384
WARPS = 8
USES_BIAS, USES_PENALTIES = tl.constexpr(BIAS), tl.constexpr(PENALTIES)
USES_MIN_TOKENS, USES_BAD_WORDS = tl.constexpr(MIN_TOKENS), tl.constexpr(BAD_WORDS)
USES_FILTERS, USES_NOISE = tl.constexpr(FILTERS), tl.constexpr(NOISE)
LOWEST, HIGHEST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


@triton.jit
def _ban_words(
    x, ids, position, line, words, W: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr
):
    """-inf for the last token of each word whose other tokens stand in front of position."""
    lane = tl.arange(0, LANES)
    for i in range(W):
        last = tl.load(words + i * L + L - 1)
        back = position - (L - 1) + lane
        prefix = tl.load(words + i * L + lane, mask=lane < L - 1, other=-1)
        used = prefix >= 0
        seen = tl.load(line + tl.maximum(back, 0), mask=lane < L - 1, other=-1)
        count = tl.sum(used.to(tl.int64), 0)
        wrong = tl.sum((used & (seen != prefix)).to(tl.int64), 0)
        if (last >= 0) & (wrong == 0) & (position >= count):
            x = tl.where(ids == last, float("-inf"), x)
    return x


@triton.jit
def _token(kept, places, live):
    """The tokens at these places of a line of logits; kept: None, or the token of each place."""
    if kept is not None:
        places = tl.load(kept + places, mask=live, other=0).to(tl.int32)
    return places


@triton.jit
def _penalised(x, n, seen, repetition, frequency, presence):
    """n tokens generated; seen: generated or in the prompt."""
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(seen, repeated, x)
    x = x - frequency * n.to(tl.float32)
    return x - tl.where(n > 0, presence, 0.0)


@triton.jit
def _processed(
    x, spot, ids, live, at, row, use, positions, drafts, history, temperature, repetition, presence,
    frequency, bias, counts, in_prompt, min_position, stop_ids, bad_words, queries, length, tokens,
    STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A block of a line's logits -> its scores, before filters and noise."""
    line, position = row * tokens + ids, tl.load(positions + at)
    if use & USES_BIAS:
        x += tl.load(bias + line, mask=live, other=0.0)
    if use & USES_BAD_WORDS:
        words = bad_words + row * W * L
        x = _ban_words(x, ids, position, history + row * length, words, W, L, LANES)
    if use & USES_MIN_TOKENS:
        if position < tl.load(min_position + row):
            for i in range(STOPS):
                stop = tl.load(stop_ids + row * STOPS + i)
                x = tl.where(ids == stop, float("-inf"), x)
    if use & USES_PENALTIES:
        n = tl.load(counts + line, mask=live, other=0)
        for i in range((at % queries).to(tl.int32)):
            draft = tl.load(drafts + at // queries * (queries - 1) + i)
            n += (ids == draft).to(tl.int32)
        seen = (n > 0) | (tl.load(in_prompt + line, mask=live, other=0) != 0)
        x = _penalised(
            x, n, seen, tl.load(repetition + row), tl.load(frequency + row),
            tl.load(presence + row),
        )  # fmt: skip
    if use & USES_NOISE:
        x = tl.div_rn(x, tl.zeros_like(x) + tl.load(temperature + row))
    return x


@triton.jit
def _key(x):
    """fp32 -> int32 in the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count(scores, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many scores have a key of at least `least`."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + ids, mask=ids < VOCAB, other=0.0)
        total += ((_key(x) >= least) & (ids < VOCAB)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass(scores, top, above, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp(score - top) over scores with a key above `above`."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + ids, mask=ids < VOCAB, other=float("-inf"))
        total += tl.where((_key(x) > above) & (ids < VOCAB), tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _ties(scores, key, last, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the ids up to `last` have this key."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + ids, mask=ids < VOCAB, other=0.0)
        total += ((_key(x) == key) & (ids < VOCAB) & (ids <= last)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _nucleus(scores, top, floor, top_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Top-p among keys from `floor` up -> (threshold key, last id kept at the threshold).

    The threshold is the smallest key with less than top_p of the mass above it; of its ties the
    smallest ids are kept until top_p is reached.
    """
    wanted = top_p * _mass(scores, top, floor - 1, VOCAB, BLOCK)
    low, high = floor, _key(top).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = _mass(scores, top, middle, VOCAB, BLOCK) >= wanted
        low, high = tl.where(enough, middle + 1, low), tl.where(enough, high, middle)
    threshold = low
    bits = threshold.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    missing = wanted - _mass(scores, top, threshold, VOCAB, BLOCK)
    ties = tl.maximum(tl.ceil(tl.div_rn(missing, tl.exp(value - top))), 1.0)
    first, last = tl.full((), 0, tl.int32), tl.full((), VOCAB - 1, tl.int32)
    while first < last:
        middle = (first + last) >> 1
        enough = _ties(scores, threshold, middle, VOCAB, BLOCK).to(tl.float32) >= ties
        first, last = tl.where(enough, first, middle + 1), tl.where(enough, middle, last)
    return threshold, first


@triton.jit
def _filter(scores, least, k, p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """min_p, top_k and top_p of a line -> the key from which tokens may be picked, and the last id
    kept at that key."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(scores + ids, mask=ids < VOCAB, other=float("-inf")))
    top = tl.max(best, 0)
    floor = tl.full((), LOWEST, tl.int64)
    if least > 0:
        floor = _key(top + tl.log(least)).to(tl.int64)
    if (k > 0) & (k < VOCAB):
        low, high = tl.full((), LOWEST, tl.int64), _key(top).to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            enough = _count(scores, middle, VOCAB, BLOCK) >= k
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
        floor = tl.maximum(floor, low)
    last = tl.full((), VOCAB - 1, tl.int32)
    if p < 1:
        floor, last = _nucleus(scores, top, floor, p, VOCAB, BLOCK)
    return floor, last


@triton.jit
def _mix(x):
    """murmur3's fmix32 on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, ids):
    """The noise of lockstep.kernels.sampling.gumbel at ids."""
    zero = tl.zeros_like(ids).to(tl.uint32)
    key = _mix((zero + seed.to(tl.uint32)) ^ 0x9E3779B9)
    key = _mix(key ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position.to(tl.uint32))
    bits = _mix(_mix(key ^ ids.to(tl.uint32)) ^ key) >> 9
    uniform = (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _best(x, place):
    """The largest of x, and its smallest place."""
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, place, HIGHEST), 0)


@triton.jit
def _better(x, spot, best, place):
    """The better of two per lane; of equal ones the one that came first. NaN is never better."""
    wins = x > best
    return tl.where(wins, x, best), tl.where(wins, spot, place)


@triton.jit(do_not_specialize=["queries", "length", "tokens"])
def _score_kernel(
    logits, positions, drafts, row_ids, history, scores, values, places, kept, flags, seeds,
    temperature, repetition, presence, frequency, bias, counts, in_prompt, min_position, stop_ids,
    bad_words, queries, length, tokens,
    VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    LANES: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One line's SPAN logits: their best, or, for rows that filter, their scores."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, begin = tl.load(row_ids + at // queries), part * SPAN
    use = tl.load(flags + row)
    filters = (use & (USES_FILTERS | USES_NOISE)) == (USES_FILTERS | USES_NOISE)
    logits, scores = logits + at * VOCAB, scores + at * VOCAB
    if use == 0:
        spot = begin + tl.arange(0, SPAN)
        x = tl.load(logits + spot, mask=spot < VOCAB, other=float("-inf")).to(tl.float32)
        lowest = tl.full((SPAN,), float("-inf"), tl.float32)
        best, place = _better(x, spot, lowest, begin + tl.zeros_like(spot))
        top, first = _best(best, place)
    else:
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        place = tl.zeros((BLOCK,), tl.int32) + begin
        for offset in range(begin, begin + SPAN, BLOCK):
            spot = offset + tl.arange(0, BLOCK)
            live = spot < VOCAB
            ids = _token(kept, spot, live)
            x = tl.load(logits + spot, mask=live, other=float("-inf")).to(tl.float32)
            x = _processed(
                x, spot, ids, live, at, row, use, positions, drafts, history, temperature,
                repetition, presence, frequency, bias, counts, in_prompt, min_position, stop_ids,
                bad_words, queries, length, tokens, STOPS, W, L, LANES,
            )  # fmt: skip
            if filters:
                tl.store(scores + spot, x, mask=live)
            elif use & USES_NOISE:
                x += _gumbel(tl.load(seeds + row), tl.load(positions + at), ids)
            best, place = _better(x, spot, best, place)
        top, first = _best(best, place)
    part += at * tl.num_programs(1)
    tl.store(values + part, top)
    tl.store(places + part, first)


@triton.jit(do_not_specialize=["queries"])
def _choose_kernel(
    scores, values, places, positions, row_ids, kept, out, flags, seeds, min_p, top_k, top_p,
    queries,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One line: the best of its parts; or, for rows that filter, of the tokens that are left."""
    at, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    row = tl.load(row_ids + at // queries)
    use, scores = tl.load(flags + row), scores + at * VOCAB
    if (use & (USES_FILTERS | USES_NOISE)) == (USES_FILTERS | USES_NOISE):
        least, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
        threshold, last = _filter(scores, least, k, p, VOCAB, BLOCK)
        seed, position = tl.load(seeds + row), tl.load(positions + at)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        place = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, VOCAB, BLOCK):
            spot = begin + tl.arange(0, BLOCK)
            live = spot < VOCAB
            x = tl.load(scores + spot, mask=live, other=float("-inf"))
            key = _key(x)
            live = live & ((key > threshold) | ((key == threshold) & (spot <= last)))
            x += _gumbel(seed, position, _token(kept, spot, live))
            best, place = _better(tl.where(live, x, float("-inf")), spot, best, place)
        chosen = _best(best, place)[1]
    else:
        live = lanes < PARTS
        value = tl.load(values + at * PARTS + lanes, mask=live, other=float("-inf"))
        place = tl.load(places + at * PARTS + lanes, mask=live, other=HIGHEST)
        chosen = _best(value, place)[1]
    if kept is not None:
        chosen = tl.load(kept + chosen)
    tl.store(out + at, chosen.to(tl.int64))


def _supports(**traits: Any) -> str | None:
    vocab = traits.get("vocab", 1)
    return f"vocab {vocab} is above 2^24" if vocab > 1 << 24 else gpu_trait(device=traits["device"])


@sample.backend("triton", supports=_supports)
def sample_triton(
    logits: Tensor,
    positions: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    history: Tensor,
    state: SamplingState,
    ids: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.sampling.sample. logits, positions and drafts are contiguous."""
    rows, queries, vocab = logits.shape
    lines, parts = rows * queries, triton.cdiv(vocab, SPAN)
    out = row_ids.new_empty(rows, queries)
    if not lines:
        return out
    scores, values = (logits.new_empty(lines, n, dtype=torch.float32) for n in (vocab, parts))
    places = out.new_empty(lines, parts, dtype=torch.int32)
    words, word_length = state.bad_words.shape[1:]
    _score_kernel[(lines, parts)](
        logits, positions, drafts, row_ids, history, scores, values, places, ids, state.flags,
        state.seed, state.temperature, state.repetition, state.presence, state.frequency,
        state.bias, state.counts, state.in_prompt.view(torch.uint8), state.min_position,
        state.stop_ids, state.bad_words, queries, history.shape[1], state.bias.shape[1],
        VOCAB=vocab, STOPS=state.stop_ids.shape[1], W=words, L=word_length,
        LANES=triton.next_power_of_2(word_length), SPAN=SPAN, BLOCK=BLOCK, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    _choose_kernel[(lines,)](
        scores, values, places, positions, row_ids, ids, out, state.flags, state.seed, state.min_p,
        state.top_k, state.top_p, queries, VOCAB=vocab, PARTS=parts,
        LANES=triton.next_power_of_2(parts), BLOCK=min(FILTER_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
