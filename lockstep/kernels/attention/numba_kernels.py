# mypy: ignore-errors
"""Numba kernel of paged_attention: a softmax per KV split, splits combined in ascending order.

The bits of a query depend on its row's keys alone:

    score_j   = 16 lanes of fma over the head's dims, added as a binary tree
    max, sum  = over the split's keys; weights exp(score_j - max), 16 lanes of keys, a binary tree
    out_d     = fma(weight_j, v_jd, out_d) over ascending keys j of the split
    combine   = outputs and sums of splits, each rescaled to the row's maximum, in ascending order
"""

import numpy as np

from lockstep.kernels.simd.compiler import KernelTable, inline, keep_alive, kernel
from lockstep.kernels.simd.functions import exp, sigmoid
from lockstep.kernels.simd.vectors import (
    F32,
    FLOATS,
    LANES,
    fma,
    load,
    load_int32,
    max_lanes,
    rounded,
    splat,
    store,
    sum_lanes,
    vload,
    vload_part,
    vmax,
    vstore,
    vstore_part,
    zeros,
)

SPLIT = 256
"""Keys of a KV split: lockstep.kernels.attention.KV_SPLIT."""
MIN_SCORE = F32(np.finfo(np.float32).min)
LOWEST = F32(-np.inf)


@inline
def _score(dtype, q, k, dim):
    """Return the dot product of q [D] fp32 and a key."""
    acc = zeros()
    for d in range(0, dim, LANES):
        acc = fma(vload_part(F32, q, d, dim), vload_part(dtype, k, d, dim), acc)
    return sum_lanes(acc)


@inline
def _softmax_weights(scores, count):
    """Replace a split's scores by exp(score - maximum). Returns (maximum, sum of the weights)."""
    # Lanes past the last key get weight 0: exp(-inf).
    padded = -(-count // LANES) * LANES
    for j in range(count, padded):
        store(F32, scores, j, LOWEST)
    lane_max = splat(LOWEST)
    for j in range(0, padded, LANES):
        # A NaN score stays a NaN weight, whatever the maximum is.
        lane_max = vmax(lane_max, vload(F32, scores, j))
    row_max = max(max_lanes(lane_max), MIN_SCORE)
    shift = splat(row_max)
    total = zeros()
    for j in range(0, padded, LANES):
        weights = exp(vload(F32, scores, j) - shift)
        vstore(F32, scores, j, weights)
        total = total + weights
    return row_max, sum_lanes(total)


@inline
def _page_run(pages, page_size, first, j, count):
    """Return the slot of a split's key j, and the end of the keys from j on in the same page.

    Divisions by the page size take as long as a key's products: one pair serves a whole page.
    """
    token = first + j
    within = token % page_size
    slot = load_int32(pages, token // page_size) * page_size + within
    return slot, min(count, j + page_size - within)


@inline
def _attend(dtype, size, q, k_cache, v_cache, pages, page_size, kv_heads, head, dim, last, scratch):
    """Attend with one query over the keys 0 .. last.

    q: [D] fp32, scaled. head: the KV head. scratch: SPLIT scores, then two vectors of D padded
    elements, the split's output and the total. The total is left in the last one, not divided.
    Returns the total's sum of weights.
    """
    scores = scratch
    padded = -(-dim // LANES) * LANES
    split_out = scratch + SPLIT * 4
    total_out = split_out + padded * 4
    total_max = LOWEST
    total_sum = F32(0.0)
    for first in range(0, last + 1, SPLIT):
        count = min(SPLIT, last + 1 - first)
        j = 0
        while j < count:
            slot, end = _page_run(pages, page_size, first, j, count)
            key = k_cache + (slot * kv_heads + head) * dim * size
            while j < end:
                store(F32, scores, j, _score(dtype, q, key, dim))
                key += kv_heads * dim * size
                j += 1
        split_max, split_sum = _softmax_weights(scores, count)
        _add_values(
            dtype, size, scores, split_out, v_cache, pages, page_size, kv_heads, head, dim, first,
            count,
        )  # fmt: skip
        if first == 0:
            for d in range(0, padded, LANES):
                vstore(F32, total_out, d, vload(F32, split_out, d))
            total_max = split_max
            total_sum = split_sum
            continue
        row_max = max(total_max, split_max)
        old = exp(splat(total_max - row_max))
        new = exp(splat(split_max - row_max))
        for d in range(0, padded, LANES):
            value = vload(F32, total_out, d) * old + vload(F32, split_out, d) * new
            vstore(F32, total_out, d, value)
        sums = splat(total_sum) * old + splat(split_sum) * new
        total_sum = max_lanes(sums)
        total_max = row_max
    return total_sum


@inline
def _add_values(
    dtype, size, weights, out, v_cache, pages, page_size, kv_heads, head, dim, first, count
):  # fmt: skip
    """Add a split's values times their weights, 4 vectors of dims at a time."""
    for d in range(0, dim, 4 * LANES):
        acc0 = zeros()
        acc1 = zeros()
        acc2 = zeros()
        acc3 = zeros()
        in_range = d + 4 * LANES <= dim
        j = 0
        while j < count:
            slot, end = _page_run(pages, page_size, first, j, count)
            value = v_cache + (slot * kv_heads + head) * dim * size
            while j < end:
                weight = splat(load(F32, weights, j))
                if in_range:
                    acc0 = fma(weight, vload(dtype, value, d), acc0)
                    acc1 = fma(weight, vload(dtype, value, d + LANES), acc1)
                    acc2 = fma(weight, vload(dtype, value, d + 2 * LANES), acc2)
                    acc3 = fma(weight, vload(dtype, value, d + 3 * LANES), acc3)
                else:
                    acc0 = fma(weight, vload_part(dtype, value, d, dim), acc0)
                    if d + LANES < dim:
                        acc1 = fma(weight, vload_part(dtype, value, d + LANES, dim), acc1)
                    if d + 2 * LANES < dim:
                        acc2 = fma(weight, vload_part(dtype, value, d + 2 * LANES, dim), acc2)
                    if d + 3 * LANES < dim:
                        acc3 = fma(weight, vload_part(dtype, value, d + 3 * LANES, dim), acc3)
                value += kv_heads * dim * size
                j += 1
        vstore(F32, out, d, acc0)
        if d + LANES < dim:
            vstore(F32, out, d + LANES, acc1)
        if d + 2 * LANES < dim:
            vstore(F32, out, d + 2 * LANES, acc2)
        if d + 3 * LANES < dim:
            vstore(F32, out, d + 3 * LANES, acc3)


def _make_kernel(dtype, size):
    """Return the kernel of one dtype."""

    @kernel
    def paged_attention(
        q, k_cache, v_cache, page_table, cu_seqlens, starts, gates, out, rows, table_stride,
        page_size, heads, kv_heads, dim, scale, gate_stride, rotated, begin, end,
    ):  # fmt: skip
        """Attend with the (token, head) units begin .. end of all rows.

        rotated: store fp32, which the caller rotates back, rounds and gates. gates: 0 for none.
        """
        padded = -(-dim // LANES) * LANES
        memory = np.empty(SPLIT + 3 * padded, np.float32)
        query = memory.ctypes.data
        scratch = query + padded * 4
        total_out = scratch + (SPLIT + padded) * 4
        group = heads // kv_heads
        factor = splat(F32(scale))
        row = 0
        for unit in range(begin, end):
            token = unit // heads
            h = unit % heads
            while row < rows and load_int32(cu_seqlens, row + 1) <= token:
                row += 1
            if row == rows:
                break  # the tokens after the last row's are padding
            last = load_int32(starts, row) + token - load_int32(cu_seqlens, row)
            head_offset = unit * dim
            for d in range(0, dim, LANES):
                vstore(F32, query, d, vload_part(dtype, q + head_offset * size, d, dim) * factor)
            total_sum = _attend(
                dtype, size, query, k_cache, v_cache, page_table + row * table_stride * 4,
                page_size, kv_heads, h // group, dim, last, scratch,
            )  # fmt: skip
            divisor = splat(total_sum)
            gate = gates + (token * gate_stride + (2 * h + 1) * dim) * size
            for d in range(0, dim, LANES):
                value = vload(F32, total_out, d) / divisor
                if rotated:
                    vstore_part(F32, out + head_offset * 4, d, dim, value)
                else:
                    if gates != 0:
                        factors = rounded(dtype, sigmoid(vload_part(dtype, gate, d, dim)))
                        value = rounded(dtype, value) * factors
                    vstore_part(dtype, out + head_offset * size, d, dim, value)
        keep_alive(memory)

    return paged_attention


KERNELS = KernelTable(
    (dtype, _make_kernel(loaded, dtype.itemsize)) for dtype, loaded in FLOATS.items()
)
