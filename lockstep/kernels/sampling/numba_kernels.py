# mypy: ignore-errors
"""Numba kernels of sample: the largest score of a row, and uniform numbers of a hash."""

import numpy as np

from lockstep.kernels.simd.compiler import inline, kernel
from lockstep.kernels.simd.vectors import (
    F32,
    LANES,
    load,
    load_int,
    max_lanes,
    splat,
    store,
    store_int,
    sum_lanes,
    vload,
    vmax,
    vmin,
    zeros,
)

BLOCK = 512
"""Scores, a multiple of 16, whose maximum is computed before the index of the largest is."""
LOWEST = F32(-np.inf)
MASK = np.uint64(0xFFFFFFFF)


@inline
def _first_nan(x, count):
    """Return the index of the first NaN, or count."""
    for i in range(count):
        if np.isnan(load(F32, x, i)):
            return i
    return count


@kernel
def find_best(scores, indices, tops, rows, count):
    """Write index and value of the largest of each row's scores; NaN counts as largest."""
    for r in range(rows):
        x = scores + r * count * 4
        vector_end = count // LANES * LANES
        best = LOWEST
        block = 0
        nans = zeros()
        for begin in range(0, vector_end, BLOCK):
            top = splat(LOWEST)
            for i in range(begin, min(begin + BLOCK, vector_end), LANES):
                value = vload(F32, x, i)
                top = vmax(top, value)
                # 0, or NaN of a NaN, since both functions keep the NaN of their first argument.
                nans = nans + vmax(vmin(value, zeros()), zeros())
            block_top = max_lanes(top)
            if block_top > best:
                best = block_top
                block = begin
        has_nan = np.isnan(sum_lanes(nans))
        for i in range(vector_end, count):
            value = load(F32, x, i)
            has_nan = has_nan or np.isnan(value)
            if value > best:
                best = value
                block = vector_end
        index = block
        if has_nan:
            index = _first_nan(x, count)
        else:
            while load(F32, x, index) != best:
                index += 1
        store_int(indices, r, index)
        store(F32, tops, r, load(F32, x, index))


@inline
def _mix(x):
    """Apply murmur3's fmix32."""
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x85EBCA6B) & MASK
    x ^= x >> np.uint64(13)
    x = x * np.uint64(0xC2B2AE35) & MASK
    return x ^ (x >> np.uint64(16))


@kernel
def uniform(key, ids, out, count):
    """Write the uniform numbers of a position's key and token ids."""
    for i in range(count):
        bits = _mix(np.uint64(key) ^ np.uint64(load_int(ids, i)))
        bits = _mix(bits ^ np.uint64(key)) >> np.uint64(9)
        store(F32, out, i, (F32(bits) + F32(0.5)) * F32(2.0**-23))
