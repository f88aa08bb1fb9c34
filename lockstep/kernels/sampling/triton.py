"""sample in Triton: process, filter, pick, choose; no sort, no host read, one line per position.

A position's flags are read on the device. Rows without flags go straight from their logits to the
argmax. Largest values and counts are exact in any order; the one sum (top-p's mass) runs block by
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

BLOCK, FILTER_BLOCK = 4096, 16384
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


@triton.jit(do_not_specialize=["queries", "tokens_stride", "line_length"])
def _process_kernel(
    logits, positions, drafts, row_ids, history, scores, flags, temperature, repetition, presence,
    frequency, bias, counts, in_prompt, min_position, stop_ids, bad_words, kept, queries,
    tokens_stride, line_length, VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr,
    L: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One (position, block of the vocabulary): processed logits, for rows that ask for any."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + at // queries)
    use = tl.load(flags + row)
    if use == 0:
        return
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = places < VOCAB
    ids = _token(kept, places, live)
    line = row * line_length + ids
    x = tl.load(logits + at * VOCAB + places, mask=live, other=float("-inf"))
    position = tl.load(positions + at)
    if use & USES_BIAS:
        x += tl.load(bias + line, mask=live, other=0.0)
    if use & USES_BAD_WORDS:
        x = _ban_words(
            x, ids, position, history + row * tokens_stride, bad_words + row * W * L, W, L, LANES
        )
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
    tl.store(scores + at * VOCAB + places, x, mask=live)


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


@triton.jit(do_not_specialize=["queries"], do_not_specialize_on_alignment=["scores"])
def _filter_kernel(
    scores, row_ids, thresholds, last_ids, flags, min_p, top_k, top_p, queries,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One position: the key from which tokens may be picked, and the last id kept at that key."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + at // queries)
    use, scores = tl.load(flags + row), scores + at * VOCAB
    if ((use & USES_FILTERS) == 0) | ((use & USES_NOISE) == 0):
        return
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(scores + ids, mask=ids < VOCAB, other=float("-inf")))
    top = tl.max(best, 0)
    floor = tl.full((), LOWEST, tl.int64)
    least, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
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
    tl.store(thresholds + at, floor.to(tl.int32))
    tl.store(last_ids + at, last)


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


@triton.jit(do_not_specialize=["queries"])
def _pick_kernel(
    logits, scores, positions, row_ids, thresholds, last_ids, flags, seeds, kept, values, places,
    queries, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One (position, block of the vocabulary): its best score, filtered and with noise."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + at // queries)
    use = tl.load(flags + row)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plain = (ids < VOCAB) & (use == 0)
    x = tl.load(logits + at * VOCAB + ids, mask=plain, other=float("-inf"))
    if use != 0:
        x = tl.load(scores + at * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    if use & USES_NOISE:
        token = _token(kept, ids, ids < VOCAB)
        noisy = x + _gumbel(tl.load(seeds + row), tl.load(positions + at), token)
        if use & USES_FILTERS:
            key, threshold = _key(x), tl.load(thresholds + at)
            tied = (key == threshold) & (ids <= tl.load(last_ids + at))
            noisy = tl.where((key > threshold) | tied, noisy, float("-inf"))
        x = noisy
    best = tl.max(x, 0)
    part = at * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + part, best)
    tl.store(places + part, tl.min(tl.where((x == best) & (ids < VOCAB), ids, VOCAB - 1), 0))


@triton.jit
def _choose_kernel(values, places, kept, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One position: the best of its blocks, the smaller id where they tie."""
    at, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = lanes < PARTS
    value = tl.load(values + at * PARTS + lanes, mask=live, other=float("-inf"))
    place = tl.load(places + at * PARTS + lanes, mask=live, other=HIGHEST)
    first = tl.load(places + at * PARTS)
    place = tl.where(live & (value == tl.max(value, 0)), place, HIGHEST)
    best = tl.min(place, 0)
    best = tl.where(best == HIGHEST, first, best).to(tl.int64)
    if kept is not None:
        best = tl.load(kept + best)
    tl.store(out + at, best)


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
    """See lockstep.kernels.sampling.sample. logits are contiguous."""
    rows, queries, vocab = logits.shape
    lines, parts = rows * queries, triton.cdiv(vocab, BLOCK)
    out = torch.empty(rows, queries, dtype=torch.int64, device=logits.device)
    if not lines:
        return out
    positions, drafts = positions.contiguous(), drafts.contiguous()
    scores, values = torch.empty_like(logits), logits.new_empty(lines * parts)
    places, thresholds, last_ids = (
        out.new_empty(n, dtype=torch.int32) for n in (lines * parts, lines, lines)
    )
    words, length = state.bad_words.shape[1:]
    exact = dict(VOCAB=vocab, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False)
    _process_kernel[(lines, parts)](
        logits, positions, drafts, row_ids, history, scores, state.flags, state.temperature,
        state.repetition, state.presence, state.frequency, state.bias, state.counts,
        state.in_prompt.view(torch.uint8), state.min_position, state.stop_ids, state.bad_words, ids,
        queries, history.stride(0), state.bias.stride(0), STOPS=state.stop_ids.shape[1], W=words,
        L=length, LANES=triton.next_power_of_2(length), **exact,
    )  # fmt: skip
    _filter_kernel[(lines,)](
        scores, row_ids, thresholds, last_ids, state.flags, state.min_p, state.top_k, state.top_p,
        queries, VOCAB=vocab, BLOCK=min(FILTER_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    _pick_kernel[(lines, parts)](
        logits, scores, positions, row_ids, thresholds, last_ids, state.flags, state.seed, ids,
        values, places, queries, **exact,
    )  # fmt: skip
    block = triton.next_power_of_2(parts)
    _choose_kernel[(lines,)](values, places, ids, out, parts, block, num_warps=1)
    return out
