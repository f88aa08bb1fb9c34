# mypy: ignore-errors
"""min_p, top_k and top_p over one logit row's scores, in one CTA, without a sort.

A logit row is cut into groups of GROUP tokens, whose maximum scores, the peaks, are known. The TILE
groups with the highest peaks contain every token above the next lower peak, usually all that can
pass the filters. They are gathered into a compact tile, and the filters read this tile alone. If it
does not suffice, the full logit row is read: its scores are stored first, a few rows at a time.

Where ranks share a row, each proposes the TILE groups of its logits with the highest peaks, which
include those of the row (exchange_kernels.py). The tile, and every sum, is that of a single rank.

Thresholds are found by bisection over the ordered bits of a float. Counts are exact in any order.
The only floating-point sum, top-p's mass, runs block by block in one layout, over the tile or over
the logit row; the logit row alone decides which.
"""

import triton
import triton.language as tl

from lockstep.kernels.sampling.device_score import (
    MIN_P,
    TOP_K,
    TOP_P,
    integer_of,
    number_of,
    scores_at,
)

LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)
NOTHING = tl.constexpr(-2139095041)
"""Key of -inf."""


@triton.jit
def best_of(x, index):
    """Return the largest of x and its smallest index."""
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, index, HIGHEST), 0)


@triton.jit
def better_of(x, spot, best, index):
    """Return the better of two scores per lane, the earlier of equal ones. NaN is never better."""
    wins = x > best
    return tl.where(wins, x, best), tl.where(wins, spot, index)


@triton.jit
def key_of(x):
    """Map fp32 to int32 keys of the same order."""
    # Adding 0.0 turns -0 into 0, so that both have one key. Negative floats have reversed order.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count(scores, min_key, size, BLOCK: tl.constexpr):
    """Count the scores, of `size`, whose key is min_key or larger."""
    min_key = min_key.to(tl.int32)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + index, mask=index < size, other=0.0)
        total += ((key_of(x) >= min_key) & (index < size)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass(scores, top, min_key, size, BLOCK: tl.constexpr):
    """Sum exp(score - top) over scores whose key is min_key or larger."""
    min_key = min_key.to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + index, mask=index < size, other=float("-inf"))
        total += tl.where((key_of(x) >= min_key) & (index < size), tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _ties(scores, key, last, BLOCK: tl.constexpr):
    """Count the scores up to index `last` that have this key."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, last + 1, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + index, mask=index <= last, other=0.0)
        total += ((key_of(x) == key) & (index <= last)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _nth(scores, n, low, high, size, BLOCK: tl.constexpr):
    """Return the key of the n-th largest score, by bisection; low if there is none."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _count(scores, middle, size, BLOCK) >= n
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _nucleus(scores, top, low, wanted, size, BLOCK: tl.constexpr):
    """Return the top-p threshold: the smallest key >= low with less than the wanted mass above it.

    Also returns the last index that is kept at that key, so that the mass is reached.
    """
    high = key_of(top).to(tl.int64)
    above = tl.full((), 0.0, tl.float32)
    while low < high:
        middle = (low + high) >> 1
        mass = _mass(scores, top, middle + 1, size, BLOCK)
        enough = mass >= wanted
        low = tl.where(enough, middle + 1, low)
        high = tl.where(enough, high, middle)
        above = tl.where(enough, above, mass)
    threshold = low.to(tl.int32)
    value = (threshold ^ ((threshold >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    ties = tl.maximum(tl.ceil(tl.div_rn(wanted - above, tl.exp(value - top))), 1.0)
    first = tl.full((), 0, tl.int32)
    last = tl.full((), size - 1, tl.int32)
    while first < last:
        middle = (first + last) >> 1
        enough = _ties(scores, threshold, middle, BLOCK).to(tl.float32) >= ties
        first = tl.where(enough, first, middle + 1)
        last = tl.where(enough, middle, last)
    return threshold, first


@triton.jit
def bound_of(keys, n, highest):
    """Return the smallest key that at most n of keys [LANES] int32 reach."""
    low = tl.full((), LOWEST, tl.int64)
    high = highest + 1
    while low < high:
        middle = (low + high) >> 1
        fits = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) <= n
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    return low


@triton.jit
def compact(numbers, selected, chosen):
    """Store the selected numbers [LANES] int32 next to each other, in order; return their count."""
    order = tl.cumsum(selected.to(tl.int32), 0) - 1
    count = tl.sum(selected.to(tl.int32), 0)
    tl.store(chosen + order, numbers, mask=selected)
    tl.debug_barrier()  # the caller reads values of other threads
    return count


@triton.jit
def _gather(
    logit_row, inside, groups, tile, spots,
    VOCAB: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy the scores of the selected groups, at most TILE, to the tile in ascending order."""
    count = compact(tl.arange(0, LANES), inside, groups)
    slot = tl.arange(0, TILE)
    group = tl.load(groups + slot, mask=slot < count, other=0)
    spot = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = (slot < count)[:, None] & (spot < VOCAB)
    index = slot[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(tile + index, scores_at(logit_row, spot, live))
    tl.store(spots + index, tl.where(live, spot, 0))
    tl.debug_barrier()  # the tile is read in another layout


@triton.jit
def _total_mass(masses, peak, top, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """Combine the masses of a logit row's blocks, each relative to its block's largest score."""
    lane = tl.arange(0, LANES)
    peaks = tl.max(tl.reshape(peak, (LANES, peak.shape[0] // LANES)), 1)
    mass = tl.load(masses + lane, mask=lane < BLOCKS, other=0.0)
    return tl.sum(tl.where(mass > 0, mass * tl.exp(peaks - top), 0.0), 0)


@triton.jit
def limits_of(logit_row):
    """Return min_p, top_k and top_p of a logit row."""
    of = logit_row.of
    row = logit_row.row
    return number_of(of, row, MIN_P), integer_of(of, row, TOP_K), number_of(of, row, TOP_P)


@triton.jit
def floor_of(top, min_p):
    """Return the smallest key that passes min_p."""
    floor = tl.full((), LOWEST, tl.int64)
    if min_p > 0:
        floor = key_of(top + tl.log(min_p)).to(tl.int64)
    return floor


@triton.jit
def gather_tile(
    logit_row, peaks, groups, tile, spots,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Gather the tile of a logit row -> peak, top, floor and bound for filter_candidates."""
    min_p, _, _ = limits_of(logit_row)
    lane = tl.arange(0, LANES)
    peak = tl.load(peaks + lane, mask=lane < GROUPS, other=float("-inf"))
    keys = key_of(peak)
    top = tl.max(peak, 0)
    highest = key_of(top).to(tl.int64)
    floor = floor_of(top, min_p)
    bound = tl.maximum(tl.maximum(bound_of(keys, TILE, highest), floor), NOTHING + 1)
    _gather(logit_row, keys >= bound.to(tl.int32), groups, tile, spots, VOCAB, LANES, GROUP, TILE)
    return peak, top, floor, bound


@triton.jit
def filter_candidates(
    logit_row, tile, peak, masses, top, floor, bound,
    VOCAB: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_LANES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Apply min_p, top_k and top_p to the tile of a logit row.

    Returns whether the tile includes all tokens that pass, the threshold key, and the last index
    that is kept at the threshold.

    tile: SIZE scores, those of all groups whose peak's key is `bound` or larger. peak [LANES]: the
    peaks of all groups, or only the largest of each block. top: the largest score. floor: the
    smallest key that passes min_p.
    """
    min_p, k, p = limits_of(logit_row)
    highest = key_of(top).to(tl.int64)
    complete = (floor >= bound) | (bound == NOTHING + 1)
    if (k > 0) & (k < VOCAB):
        complete = complete | (_count(tile, bound, SIZE, SIZE) >= k)
        if complete:
            floor = tl.maximum(floor, _nth(tile, k, bound - 1, highest, SIZE, SIZE))
    threshold = floor.to(tl.int32)
    last = tl.full((), SIZE - 1, tl.int32)
    if p < 1:
        low = floor
        wanted = p * _mass(tile, top, floor, SIZE, SIZE)
        if (complete == 0) & (min_p <= 0) & ((k <= 0) | (k >= VOCAB)):
            low = bound
            wanted = p * _total_mass(masses, peak, top, BLOCKS, BLOCK_LANES)
            complete = _mass(tile, top, bound, SIZE, SIZE) >= wanted
        if complete:
            threshold, last = _nucleus(tile, top, low, wanted, SIZE, SIZE)
    return complete, threshold, last


@triton.jit
def filter_logit_row(scores, top, logit_row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Apply min_p, top_k and top_p to all scores of a logit row, the largest of which is top.

    Returns the threshold key, and the last index that is kept at the threshold.
    """
    min_p, k, p = limits_of(logit_row)
    floor = floor_of(top, min_p)
    if (k > 0) & (k < VOCAB):
        highest = key_of(top).to(tl.int64)
        floor = tl.maximum(floor, _nth(scores, k, floor, highest, VOCAB, BLOCK))
    threshold = floor.to(tl.int32)
    last = tl.full((), VOCAB - 1, tl.int32)
    if p < 1:
        wanted = p * _mass(scores, top, floor, VOCAB, BLOCK)
        threshold, last = _nucleus(scores, top, floor, wanted, VOCAB, BLOCK)
    return threshold, last
