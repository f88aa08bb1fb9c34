"""min_p, top_k and top_p of one line of scores, by one program: no sort.

A line is cut into groups of GROUP tokens whose largest scores, the peaks, are known. The TILE groups
of the highest peaks hold every token from the TILE-th highest peak up: as a rule all that the
filters can leave, so they are copied side by side and read instead of the line. Where they are not
all, the line is read.
Thresholds come from bisection over the ordered bits of a float. Counts are exact in any order; the
one sum, top-p's mass, runs block by block in one layout over the tokens that are read, and which
those are is a function of the line.
"""

import triton
import triton.language as tl

LOWEST, HIGHEST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
NOTHING = tl.constexpr(-2139095041)
"""The key of -inf."""
GROUP, TILE = 256, 64


@triton.jit
def best_of(x, place):
    """The largest of x, and its smallest place."""
    top = tl.max(x, 0)
    return top, tl.min(tl.where(x == top, place, HIGHEST), 0)


@triton.jit
def better_of(x, spot, best, place):
    """The better of two per lane; of equal ones the one that came first. NaN is never better."""
    wins = x > best
    return tl.where(wins, x, best), tl.where(wins, spot, place)


@triton.jit
def key_of(x):
    """fp32 -> int32 in the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _count(scores, least, size, BLOCK: tl.constexpr):
    """How many of `size` scores have a key of at least `least`."""
    least, total = least.to(tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + place, mask=place < size, other=0.0)
        total += ((key_of(x) >= least) & (place < size)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _mass(scores, top, least, size, BLOCK: tl.constexpr):
    """Sum of exp(score - top) over scores with a key of at least `least`."""
    least, total = least.to(tl.int32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + place, mask=place < size, other=float("-inf"))
        total += tl.where((key_of(x) >= least) & (place < size), tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _ties(scores, key, last, BLOCK: tl.constexpr):
    """How many of the scores up to place `last` have this key."""
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, last + 1, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(scores + place, mask=place <= last, other=0.0)
        total += ((key_of(x) == key) & (place <= last)).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _nth(scores, n, low, high, size, BLOCK: tl.constexpr):
    """The key of the n-th largest score, known to lie from low to high; low where there is none."""
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _count(scores, middle, size, BLOCK) >= n
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _nucleus(scores, top, low, wanted, size, BLOCK: tl.constexpr):
    """Top-p: the smallest key from `low` up with less than the wanted mass above it, and the last
    place kept at that key, so that the mass is reached."""
    high = key_of(top).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        enough = _mass(scores, top, middle + 1, size, BLOCK) >= wanted
        low, high = tl.where(enough, middle + 1, low), tl.where(enough, high, middle)
    threshold = low.to(tl.int32)
    value = (threshold ^ ((threshold >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    missing = wanted - _mass(scores, top, low + 1, size, BLOCK)
    ties = tl.maximum(tl.ceil(tl.div_rn(missing, tl.exp(value - top))), 1.0)
    first, last = tl.full((), 0, tl.int32), size - 1
    while first < last:
        middle = (first + last) >> 1
        enough = _ties(scores, threshold, middle, BLOCK).to(tl.float32) >= ties
        first, last = tl.where(enough, first, middle + 1), tl.where(enough, middle, last)
    return threshold, first


@triton.jit
def _gather(
    scores, peaks, bound, groups, tile, spots,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copies the groups whose peak's key is at least `bound` to the tile, TILE at most, in order;
    -> how many there are. A token of -inf need not be there."""
    lane = tl.arange(0, LANES)
    key = key_of(tl.load(peaks + lane, mask=lane < GROUPS, other=float("-inf")))
    inside = (key >= bound) & (key > NOTHING)
    order = tl.cumsum(inside.to(tl.int32), 0) - 1
    count = tl.sum(inside.to(tl.int32), 0)
    tl.store(groups + order, lane, mask=inside & (order < TILE))
    tl.debug_barrier()
    slot = tl.arange(0, TILE)
    group = tl.load(groups + slot, mask=slot < count, other=0)
    spot = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    live = (slot < count)[:, None] & (spot < VOCAB)
    place = slot[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(tile + place, tl.load(scores + spot, mask=live, other=float("-inf")))
    tl.store(spots + place, tl.where(live, spot, 0))
    tl.debug_barrier()
    return count


@triton.jit
def filtered(
    scores, peaks, groups, tile, spots, least, k, p,
    VOCAB: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """min_p, then top_k, then top_p of a line -> whether the tile is to be read; the key from which
    tokens may be picked; the last place kept at that key."""
    lane = tl.arange(0, LANES)
    top = tl.max(tl.load(peaks + lane, mask=lane < GROUPS, other=float("-inf")), 0)
    highest, floor = key_of(top).to(tl.int64), tl.full((), LOWEST, tl.int64)
    bound = _nth(peaks, TILE, floor, highest, GROUPS, LANES)
    if least > 0:
        floor = key_of(top + tl.log(least)).to(tl.int64)
        bound = tl.maximum(bound, floor)
    count = _gather(scores, peaks, bound, groups, tile, spots, VOCAB, GROUPS, LANES, GROUP, TILE)
    in_tile, has_all = count <= TILE, bound <= NOTHING
    if (k > 0) & (k < VOCAB):
        in_tile &= has_all | (_count(tile, bound, TILE * GROUP, BLOCK) >= k)
        source, size, low = _source(in_tile, scores, tile, floor, bound, VOCAB, TILE * GROUP)
        floor = tl.maximum(floor, _nth(source, k, low, highest, size, BLOCK))
    has_all |= floor >= bound
    threshold, last = floor.to(tl.int32), tl.full((), VOCAB - 1, tl.int32)
    if p < 1:
        all_in_tile = in_tile & has_all
        source, size, _ = _source(all_in_tile, scores, tile, floor, bound, VOCAB, TILE * GROUP)
        wanted = p * _mass(source, top, floor, size, BLOCK)
        in_tile &= has_all | (_mass(tile, top, bound, TILE * GROUP, BLOCK) >= wanted)
        low = tl.where(has_all, floor, bound)
        source, size, low = _source(in_tile, scores, tile, floor, low, VOCAB, TILE * GROUP)
        threshold, last = _nucleus(source, top, low, wanted, size, BLOCK)
    else:
        in_tile &= has_all
    return in_tile, threshold, last


@triton.jit
def _source(in_tile, scores, tile, floor, bound, VOCAB: tl.constexpr, SIZE: tl.constexpr):
    """What is read, how many scores that are, and the lowest key that counts there."""
    source = tl.where(in_tile, tile, scores)
    return source, tl.where(in_tile, SIZE, VOCAB), tl.where(in_tile, bound, floor)
