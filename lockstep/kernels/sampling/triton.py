"""sample in Triton: score, then choose; no sort, no host read, one line per position.

A position's flags are read on the device. Rows without flags go straight from their logits to the
argmax in one pass; only rows that filter leave their scores in memory (triton_filter.py). The
largest of a line is the same however the line is cut.
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
from lockstep.kernels.sampling.triton_filter import (
    GROUP,
    HIGHEST,
    TILE,
    best_of,
    better_of,
    filtered,
    key_of,
)

SPAN, BLOCK, LINE_BLOCK, GRAIN, MANY, MOST = 8192, 2048, 16384, 8, 16, 1 << 20
"""Logits of a program in a batch of MANY lines, and in a smaller one; scores that are read at once;
logits that lie in one lane; the largest vocabulary."""
USES_BIAS, USES_PENALTIES = tl.constexpr(BIAS), tl.constexpr(PENALTIES)
USES_MIN_TOKENS, USES_BAD_WORDS = tl.constexpr(MIN_TOKENS), tl.constexpr(BAD_WORDS)
USES_FILTERS, USES_NOISE = tl.constexpr(FILTERS), tl.constexpr(NOISE)


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
    x, ids, live, at, row, use, positions, drafts, history, temperature, repetition, presence,
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
def _plain_best(logits, begin, VOCAB: tl.constexpr, SPAN: tl.constexpr, GRAIN: tl.constexpr):
    """The best of SPAN logits as they are, and the first spot of the GRAIN logits that hold it."""
    spot = begin + tl.arange(0, SPAN)
    x = tl.load(logits + spot, mask=spot < VOCAB, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.reshape(x, (SPAN // GRAIN, GRAIN)), 1)
    best = tl.where(best == best, best, float("-inf"))
    return best_of(best, begin + GRAIN * tl.arange(0, SPAN // GRAIN))


@triton.jit(do_not_specialize=["queries", "length", "tokens"])
def _score_kernel(
    logits, positions, drafts, row_ids, history, scores, peaks, values, places, kept, flags, seeds,
    temperature, repetition, presence, frequency, bias, counts, in_prompt, min_position, stop_ids,
    bad_words, queries, length, tokens,
    VOCAB: tl.constexpr, STOPS: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    LANES: tl.constexpr, SPAN: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One line's SPAN logits: their best, or, for rows that filter, their scores and peaks."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, begin = tl.load(row_ids + at // queries), part * SPAN
    use = tl.load(flags + row)
    logits, scores = logits + at * VOCAB, scores + at * VOCAB
    part += at * tl.num_programs(1)
    if use == 0:
        top, first = _plain_best(logits, begin, VOCAB, SPAN, GRAIN)
        tl.store(values + part, top)
        tl.store(places + part, first)
        return
    filters = (use & (USES_FILTERS | USES_NOISE)) == (USES_FILTERS | USES_NOISE)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_spot = tl.zeros((BLOCK,), tl.int32) + begin
    for offset in range(begin, begin + SPAN, BLOCK):
        spot = offset + tl.arange(0, BLOCK)
        live = spot < VOCAB
        ids = _token(kept, spot, live)
        x = tl.load(logits + spot, mask=live, other=float("-inf")).to(tl.float32)
        x = _processed(
            x, ids, live, at, row, use, positions, drafts, history, temperature, repetition,
            presence, frequency, bias, counts, in_prompt, min_position, stop_ids, bad_words,
            queries, length, tokens, STOPS, W, L, LANES,
        )  # fmt: skip
        if filters:
            tl.store(scores + spot, x, mask=live)
            group = offset // GROUP + tl.arange(0, BLOCK // GROUP)
            peak = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
            tl.store(peaks + at * tl.cdiv(VOCAB, GROUP) + group, peak, mask=group * GROUP < VOCAB)
        elif use & USES_NOISE:
            x += _gumbel(tl.load(seeds + row), tl.load(positions + at), ids)
        best, best_spot = better_of(x, spot, best, best_spot)
    top, first = best_of(best, best_spot)
    tl.store(values + part, top)
    tl.store(places + part, first)


@triton.jit
def _pick(
    scores, spots, threshold, last, seed, position, kept, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of what the filters left of `size` scores, with noise; spots: None, or where in the
    line each stands."""
    best, best_spot = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        live, spot = place < size, place
        if spots is not None:
            spot = tl.load(spots + place, mask=live, other=0)
        x = tl.load(scores + place, mask=live, other=float("-inf"))
        key, noise = key_of(x), _gumbel(seed, position, _token(kept, spot, live))
        left = live & ((key > threshold) | ((key == threshold) & (place <= last)))
        x = tl.where(left, x + noise, float("-inf"))
        best, best_spot = better_of(x, spot, best, best_spot)
    return best_of(best, best_spot)[1]


@triton.jit(do_not_specialize=["queries"])
def _choose_kernel(
    logits, scores, peaks, groups, tile, spots, values, places, positions, row_ids, kept, out,
    flags, seeds, min_p, top_k, top_p, queries,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, PART_LANES: tl.constexpr, GRAIN: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One line: the best of its parts; or, for rows that filter, of the tokens that are left."""
    at, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, PART_LANES)
    row = tl.load(row_ids + at // queries)
    use = tl.load(flags + row)
    value = tl.load(values + at * PARTS + lanes, mask=lanes < PARTS, other=float("-inf"))
    place = tl.load(places + at * PARTS + lanes, mask=lanes < PARTS, other=HIGHEST)
    top, chosen = best_of(value, place)
    if use == 0:
        spot = chosen + tl.arange(0, GRAIN)
        x = tl.load(logits + at * VOCAB + spot, mask=spot < VOCAB, other=float("-inf"))
        first = tl.min(tl.where(x.to(tl.float32) == top, spot, HIGHEST), 0)
        chosen = tl.where(first < VOCAB, first, chosen)
    if (use & (USES_FILTERS | USES_NOISE)) == (USES_FILTERS | USES_NOISE):
        SIZE: tl.constexpr = TILE * GROUP
        scores, tile, spots = scores + at * VOCAB, tile + at * SIZE, spots + at * SIZE
        least, k, p = tl.load(min_p + row), tl.load(top_k + row), tl.load(top_p + row)
        in_tile, threshold, last = filtered(
            scores, peaks + at * GROUPS, groups + at * TILE, tile, spots, least, k, p,
            VOCAB, GROUPS, LANES, GROUP, TILE, BLOCK,
        )  # fmt: skip
        seed, position = tl.load(seeds + row), tl.load(positions + at)
        if in_tile:
            chosen = _pick(tile, spots, threshold, last, seed, position, kept, SIZE, SIZE)
        else:
            chosen = _pick(scores, None, threshold, last, seed, position, kept, VOCAB, BLOCK)
    if kept is not None:
        chosen = tl.load(kept + chosen)
    tl.store(out + at, chosen.to(tl.int64))


def _supports(**traits: Any) -> str | None:
    vocab = traits.get("vocab", 1)
    return f"vocab {vocab} is above {MOST}" if vocab > MOST else gpu_trait(device=traits["device"])


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
    lines, groups = rows * queries, triton.cdiv(vocab, GROUP)
    span = SPAN if lines >= MANY else BLOCK
    parts = triton.cdiv(vocab, span)
    out = row_ids.new_empty(rows, queries)
    if not lines:
        return out

    def floats(size: int) -> Tensor:
        return logits.new_empty(lines, size, dtype=torch.float32)

    def ints(size: int) -> Tensor:
        return logits.new_empty(lines, size, dtype=torch.int32)

    scores, peaks, values, places = floats(vocab), floats(groups), floats(parts), ints(parts)
    words, word_length = state.bad_words.shape[1:]
    _score_kernel[(lines, parts)](
        logits, positions, drafts, row_ids, history, scores, peaks, values, places, ids,
        state.flags, state.seed, state.temperature, state.repetition, state.presence,
        state.frequency, state.bias, state.counts, state.in_prompt.view(torch.uint8),
        state.min_position, state.stop_ids, state.bad_words, queries, history.shape[1],
        state.bias.shape[1], VOCAB=vocab, STOPS=state.stop_ids.shape[1], W=words, L=word_length,
        LANES=triton.next_power_of_2(word_length), SPAN=span, GRAIN=GRAIN, BLOCK=BLOCK,
        GROUP=GROUP, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    tile = (ints(TILE), floats(TILE * GROUP), ints(TILE * GROUP))
    _choose_kernel[(lines,)](
        logits, scores, peaks, *tile, values, places, positions, row_ids, ids, out, state.flags,
        state.seed, state.min_p, state.top_k, state.top_p, queries, VOCAB=vocab, PARTS=parts,
        PART_LANES=triton.next_power_of_2(parts), GRAIN=GRAIN, GROUPS=groups,
        LANES=triton.next_power_of_2(groups), GROUP=GROUP, TILE=TILE,
        BLOCK=min(LINE_BLOCK, triton.next_power_of_2(vocab)), num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
