# mypy: ignore-errors
"""paged_attention for long queries on Hopper, in Gluon: the fold of triton.py, bit for bit.

A program owns 128 (token, head of a group) rows of one KV head. One warp copies tiles of keys and
values through a ring in shared memory; two warpgroups of 64 rows each use them, and start the next
tile's scores while they weigh one. Where the head is 128 wide, weights
go from registers into their values at once. Where it is 256 wide, the accumulators of a segment and
of the whole do not fit the registers together: a segment's weights wait in shared memory and its
output is made 128 columns at a time. See docs/kernels/attention.md.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.triton import LOG2E, paged_attention_triton, supports
from lockstep.kernels.attention.warpgroup import (
    N_LAYOUT,
    NO_SCORE,
    O_LAYOUT,
    O_ROW,
    S_ROW,
    TILE,
    TILES,
    WIDE,
    WIDTH,
    arrived,
    copy,
    descriptors,
    load_queries,
    release,
    segment_values,
    segment_weights,
    start_scores,
    times,
    weigh,
    zero_behind,
)
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.device.ragged_rows import row_of

ROWS = 128
"""Rows of a program: two warpgroups of 64, the height of a wgmma."""
LONG = 64
"""Tokens a row from which on this kernel is the faster one: times in docs/kernels/attention.md."""
SLOTS = {128: 10, 256: 6}
"""Tiles in the ring by head dim, 16 KB each: as many as shared memory holds beside the rest."""


@gluon.jit
def _fetch(k_map, v_map, ring, full, empty, pages, tiles, column, PARTS: gl.constexpr):
    """Tiles of keys and values in the order of their use; of 128 columns, the last keys twice."""
    i = 0
    if PARTS == 1:
        for t in range(tiles):
            row = gl.load(pages + t) * 64
            i = copy(k_map, row, column, ring, full, empty, i)
            i = copy(v_map, row, column, ring, full, empty, i)
        copy(k_map, gl.load(pages + tiles - 1) * 64, column, ring, full, empty, i)
    else:
        for base in range(0, tiles, TILES):
            stop = gl.minimum(base + TILES, tiles)
            for t in range(base, stop):
                for part in gl.static_range(PARTS):
                    row = gl.load(pages + t) * 64
                    i = copy(k_map, row, column + part * WIDTH, ring, full, empty, i)
            for part in gl.static_range(PARTS):
                for t in range(base, stop):
                    row = gl.load(pages + t) * 64
                    i = copy(v_map, row, column + part * WIDTH, ring, full, empty, i)


@gluon.jit
def _fold(best, norms, top, norm):
    """One more segment: the larger maximum, the sum of weights, the factors of either side."""
    new_best = gl.maximum(best, top)
    old = gl.exp2(best - new_best)
    new = gl.exp2(top - new_best)
    return new_best, norms * old + gl.convert_layout(gl.max(norm, 1), S_ROW) * new, old, new


@gluon.jit
def _narrow(
    queries, ones, ring, full, empty, zeroed, tiles, keys, last, lowest, scale, OWN: gl.constexpr
):  # fmt: skip
    """All tiles of 128 columns: weights stay in registers -> sums of weights, output."""
    dtype: gl.constexpr = ring.dtype
    best = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
    norms = gl.zeros((64,), gl.float32, S_ROW)
    sums = gl.zeros((64, 128), gl.float32, O_LAYOUT)
    top = best
    norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
    total = sums
    scores = warpgroup_mma_wait(0, deps=(start_scores(queries, ring, full, 0, 1),))
    i = 0
    for t in range(tiles):
        release(ring, empty, i)
        ahead = start_scores(queries, ring, full, i + 2, 1)
        top, fade, weights = weigh(scores, scale, top, last, lowest, t * 64, dtype)
        norm = times(norm, fade, N_LAYOUT)
        total = times(total, fade, O_LAYOUT)
        mine = gl.convert_layout(weights, gl.DotOperandLayout(0, N_LAYOUT, 2))
        norm = warpgroup_mma(mine, ones.permute((1, 0)), norm, is_async=True)
        values = arrived(ring, full, i + 1)
        if t * 64 + 64 > keys:
            zero_behind(values, keys - t * 64, zeroed, 0, OWN)
        mine = gl.convert_layout(weights, gl.DotOperandLayout(0, O_LAYOUT, 2))
        total = warpgroup_mma(mine, values, total, is_async=True)
        norm, total, scores = warpgroup_mma_wait(0, deps=(norm, total, ahead))
        release(ring, empty, i + 1)
        i += 2
        if ((t + 1) % TILES == 0) | (t + 1 == tiles):
            best, norms, old, new = _fold(best, norms, top, norm)
            sums = times(sums, old, O_LAYOUT) + times(total, new, O_LAYOUT)
            top = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
            norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
            total = gl.zeros((64, 128), gl.float32, O_LAYOUT)
    return norms, sums


@gluon.jit
def _wide(
    queries, weights, fades, ones, ring, full, empty, zeroed, tiles, keys, last, lowest, scale,
    OWN: gl.constexpr,
):  # fmt: skip
    """All segments of 256 columns -> sums of weights, output left and right."""
    best = gl.full((64,), NO_SCORE, gl.float32, S_ROW)
    norms = gl.zeros((64,), gl.float32, S_ROW)
    left = gl.zeros((64, 128), gl.float32, O_LAYOUT)
    right = left
    i = 0
    for base in range(0, tiles, TILES):
        at = base * 64
        count = gl.minimum(TILES, tiles - base)
        i, top, norm = segment_weights(
            queries, weights, fades, ones, ring, full, empty, i, count, last, lowest, at, scale, 2
        )
        best, norms, old, new = _fold(best, norms, top, norm)
        total = segment_values(
            weights, fades, ring, full, empty, zeroed, i, count, at, keys, 0, OWN
        )
        left = times(left, old, O_LAYOUT) + times(total, new, O_LAYOUT)
        left = warpgroup_mma_wait(0, deps=(left,))  # added before the next chain takes registers
        total = segment_values(
            weights, fades, ring, full, empty, zeroed, i + count, count, at, keys, 1, OWN
        )
        right = times(right, old, O_LAYOUT) + times(total, new, O_LAYOUT)
        right = warpgroup_mma_wait(0, deps=(right,))
        i += 2 * count
    return norms, left, right


@gluon.jit
def _store(
    block, gates, out, row, count, kv, column, gate_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """128 columns of the rounded output, times the rounded output gate, into memory."""
    m = row + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    token = m // GROUP
    head = kv * GROUP + m % GROUP
    mine = (m < count * GROUP)[:, None]
    d = (column + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE)))[None, :]
    values = block.load(WIDE)
    if GATED:
        gate_at = (token * gate_stride + (head * 2 + 1) * D)[:, None] + d
        gate = gl.load(gates + gate_at, mask=mine, other=0.0).to(gl.float32)
        one = gl.full((64, WIDTH), 1.0, gl.float32, WIDE)
        gate = gl.div_rn(one, 1.0 + gl.exp(-gate))  # activations/_device.py: sigmoid
        gate = gate.to(gates.dtype.element_ty).to(gl.float32)
        values = (values.to(gl.float32) * gate).to(values.dtype)
    gl.store(out + ((token * H + head) * D)[:, None] + d, values, mask=mine)


@gluon.jit
def _store_exact(
    found, out, row, count, kv, column, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """128 columns of the output, not rounded, into memory."""
    m = row + gl.arange(0, 64, O_ROW)
    d = column + gl.arange(0, WIDTH, gl.SliceLayout(0, O_LAYOUT))
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    gl.store(out + (place[:, None] + d[None, :]), found, mask=(m < count * GROUP)[:, None])


@gluon.jit
def _attend(
    queries, weights, fades, ones, ring, full, empty, zeroed, gates, out, count, start, row, tiles,
    kv, scale, gate_stride, OWN: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Attend with one warpgroup, number OWN of two: rows row .. row + 63 of the (token, head of a
    group) of one KV head."""
    last = start + (row + gl.arange(0, 64, S_ROW)) // GROUP
    keys = start + count
    lowest = start + row // GROUP
    if D == 128:
        norms, left = _narrow(
            queries, ones, ring, full, empty, zeroed, tiles, keys, last, lowest, scale, OWN
        )  # fmt: skip
    else:
        norms, left, right = _wide(
            queries, weights, fades, ones, ring, full, empty, zeroed, tiles, keys, last, lowest,
            scale, OWN,
        )  # fmt: skip
    inverse = gl.div_rn(gl.full((64,), 1.0, gl.float32, S_ROW), norms)
    left = times(left, inverse, O_LAYOUT)
    if D > WIDTH:
        right = times(right, inverse, O_LAYOUT)
    if out.dtype.element_ty == gl.float32:
        _store_exact(left, out, row, count, kv, 0, H, GROUP, D)
        if D > WIDTH:
            _store_exact(right, out, row, count, kv, WIDTH, H, GROUP, D)
    else:
        queries.index(0).store(left.to(queries.dtype))
        if D > WIDTH:
            queries.index(1).store(right.to(queries.dtype))
        for part in range(D // WIDTH):
            _store(
                queries.index(part), gates, out, row, count, kv, part * WIDTH, gate_stride,
                H, GROUP, D, GATED,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride"])
def _prompt_kernel(
    q, k_map, v_map, page_table, cu_seqlens, starts, gates, out, scale, table_stride, gate_stride,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """128 rows of (token, head of a group); those that see most keys begin first.

    H: query heads in memory; HKV: the caches' KV heads, each read by GROUP of those. out of fp32
    is left without rounding and gate.
    """
    PARTS: gl.constexpr = D // WIDTH
    dtype: gl.constexpr = q.dtype.element_ty
    s = (gl.program_id(0) // HKV).to(gl.int64)
    kv = gl.program_id(0) % HKV
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128
    first, count, start = row_of(cu_seqlens, starts, s)
    if row < count * GROUP:
        tiles = (start + gl.minimum(count, (row + 127) // GROUP + 1) + 63) // 64
        square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        queries = gl.allocate_shared_memory(dtype, [PARTS, 64, WIDTH], square)
        queries2 = gl.allocate_shared_memory(dtype, [PARTS, 64, WIDTH], square)
        ring = gl.allocate_shared_memory(dtype, [SLOTS, 64, WIDTH], square)
        ones = gl.allocate_shared_memory(dtype, [8, 64], square)
        weights = queries
        weights2 = queries2
        fades = queries
        fades2 = queries2
        if PARTS > 1:
            flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            weights = gl.allocate_shared_memory(dtype, [TILES, 64, 64], square)
            weights2 = gl.allocate_shared_memory(dtype, [TILES, 64, 64], square)
            fades = gl.allocate_shared_memory(gl.float32, [3, 64], flat)
            fades2 = gl.allocate_shared_memory(gl.float32, [3, 64], flat)
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(zeroed, count=2)
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        ones.store(gl.full((8, 64), 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        q += first * (H * D)
        out += first * (H * D)
        if GATED:
            gates += first * gate_stride
        load_queries(q, queries, row, count, kv, H, GROUP, D)
        load_queries(q, queries2, row + 64, count, kv, H, GROUP, D)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_attend, (
                    queries, weights, fades, ones, ring, full, empty, zeroed, gates, out, count,
                    start, row, tiles, kv, scale, gate_stride, 0, H, GROUP, D, GATED,
                )),
                (_attend, (
                    queries2, weights2, fades2, ones, ring, full, empty, zeroed, gates, out, count,
                    start, row + 64, tiles, kv, scale, gate_stride, 1, H, GROUP, D, GATED,
                )),
                (_fetch, (
                    k_map, v_map, ring, full, empty, page_table + s * table_stride, tiles, kv * D,
                    PARTS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    if traits.get("head_dim", 64) not in (128, 256):
        return "head_dim is neither 128 nor 256"
    if traits.get("codecs") is not None:
        return "its copies read caches of the model's dtype, and this one is packed"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "weights are multiplied in bf16 or fp16"
    why_not = supports(**traits)
    if why_not is None and resolve_architecture(**traits) != HOPPER:
        return "wgmma is Hopper's"
    return why_not


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, query_len: int) -> bool:
    """Whether this kernel serves such a step: long queries, pages of TILE, caches in one piece."""
    whole = k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[1] == TILE
    return query_len >= LONG and whole and len(q) > 0


@paged_attention.backend("hopper", supports=_supports)
def paged_attention_hopper(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.attention.paged_attention. What does not fit goes through triton.py."""
    if not fits(q, k_cache, v_cache, query_len):
        return paged_attention_triton(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    out = torch.empty_like(q)
    attend_prompts(
        q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates, out, 0
    )
    return out


def attend_prompts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None,
    out: Tensor,
    first: int,
    kv_heads: int | None = None,
) -> None:
    """Launches the kernel over caches of some KV heads of the layer, its first-th and those behind
    it, of kv_heads in all (None: those of the caches). out of fp32: see _prompt_kernel."""
    _, heads, dim = q.shape
    here = k_cache.shape[2]
    group = heads // (kv_heads or here)
    rows = starts.shape[0]
    gated = gates is not None and out.dtype == q.dtype
    _prompt_kernel[(rows * here, triton.cdiv(query_len * group, ROWS))](
        q[:, first * group :], *descriptors(k_cache, v_cache), page_table, cu_seqlens, starts,
        gates[:, 2 * first * group * dim :] if gated else None, out[:, first * group :],
        scale * LOG2E, page_table.stride(0), gates.stride(0) if gated else 0,
        heads, here, group, dim, SLOTS[dim], gated,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
