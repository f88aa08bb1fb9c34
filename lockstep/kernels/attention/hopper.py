"""paged_attention for long queries on Hopper, in Gluon: the fold of triton.py, bit for bit.

A program owns 128 (token, head of a group) rows of one KV head. One warp brings keys and values
through a ring in shared memory, 64 tokens x WIDTH columns a slot; two warpgroups of 64 rows each
use them. Accumulators of a segment and of the whole do not fit the registers together, so a
segment's weights wait in shared memory and its output is made WIDTH columns at a time.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.attention import SEGMENT

LOG2E = 1.4426950408889634
TILE = 64
ROWS = 64
TILES = gl.constexpr(SEGMENT // TILE)
NOTHING = gl.constexpr(-1e30)


@gluon.jit
def _fetch(
    k_map, v_map, ring, full, empty, pages, tiles, column,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Per segment: its keys tile by tile, then its values column part by column part.

    Tiles after the last are copies of it: their keys are masked and their values cleared.
    """
    i = 0
    for base in range(0, tiles, TILES):
        for t in range(TILES):
            row = gl.load(pages + gl.minimum(base + t, tiles - 1)) * 64
            for part in gl.static_range(PARTS):
                i = _copy(k_map, row, column + part * WIDTH, ring, full, empty, i, WIDTH, SLOTS)
        for part in gl.static_range(PARTS):
            for t in range(TILES):
                row = gl.load(pages + gl.minimum(base + t, tiles - 1)) * 64
                i = _copy(v_map, row, column + part * WIDTH, ring, full, empty, i, WIDTH, SLOTS)


@gluon.jit
def _copy(
    source, row, column, ring, full, empty, i, WIDTH: gl.constexpr, SLOTS: gl.constexpr
):
    """The i-th copy, into slot i % SLOTS once its last reader has left."""
    slot = i % SLOTS
    mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), 64 * WIDTH * 2)
    tma.async_copy_global_to_shared(source, [row, column], full.index(slot), ring.index(slot))
    return i + 1


@gluon.jit
def _bring(
    q, queries, half, row, count, kv,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Query rows row .. row + 63 into shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    m = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    for part in gl.static_range(PARTS):
        at = place[:, None] + (part * WIDTH + d)[None, :]
        values = gl.load(q + at, mask=(m < count * GROUP)[:, None], other=0.0)
        queries.index(half * PARTS + part).store(values)
    fence_async_shared()


@gluon.jit
def _scores(
    queries, who, ring, full, empty, i, S_LAYOUT: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr
):
    """q k for the next tile [64, 64]."""
    scores = gl.zeros((64, 64), gl.float32, S_LAYOUT)
    for part in gl.static_range(PARTS):
        slot = (i + part) % SLOTS
        mbarrier.wait(full.index(slot), (i + part) // SLOTS & 1)
        keys = ring.index(slot).permute((1, 0))
        scores = warpgroup_mma(queries.index(who * PARTS + part + (i >> 30)), keys, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index((i + part) % SLOTS))
    return scores


@gluon.jit
def _clear(slot, live, WIDTH: gl.constexpr):
    """Zeros in the rows of a slot from `live` on. Both warpgroups do it, to the same effect."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    values = slot.load(layout)
    slot.store(gl.where(row < live, values, gl.zeros((64, WIDTH), values.dtype, layout)))
    fence_async_shared()


@gluon.jit
def _values(
    weights, who, ring, full, empty, i, at, keys, fade1, fade2, fade3,
    LAYOUT: gl.constexpr, WIDTH: gl.constexpr, SLOTS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """The segment's output for the next WIDTH columns [64, WIDTH]: a chain over its tiles."""
    total = gl.zeros((64, WIDTH), gl.float32, LAYOUT)
    for t in gl.static_range(TILES):
        slot = (i + t) % SLOTS
        mbarrier.wait(full.index(slot), (i + t) // SLOTS & 1)
        if EDGE:
            if at + t * 64 + 64 > keys:
                _clear(ring.index(slot), keys - at - t * 64, WIDTH)
        if t == 1:
            total = total * gl.convert_layout(fade1, gl.SliceLayout(1, LAYOUT))[:, None]
        if t == 2:
            total = total * gl.convert_layout(fade2, gl.SliceLayout(1, LAYOUT))[:, None]
        if t == 3:
            total = total * gl.convert_layout(fade3, gl.SliceLayout(1, LAYOUT))[:, None]
        total = warpgroup_mma(
            weights.index(who * TILES + t + (i >> 30)), ring.index(slot), total, use_acc=t > 0, is_async=True
        )
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(slot))
    return total


@gluon.jit
def _segment(
    queries, weights, ones, who, ring, full, empty, i, at, keys, last, scale,
    best, norms, sums0, sums1, sums2, sums3,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """Keys at .. at + 255 added to the fold. EDGE: some of them are not seen by all, or not there."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    N_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    top = gl.full((64,), NOTHING, gl.float32, S_ROW)
    norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
    for t in gl.static_range(TILES):
        scores = _scores(queries, who, ring, full, empty, i, S_LAYOUT, PARTS, SLOTS) * scale
        i += PARTS
        if EDGE:
            key = at + t * 64 + gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
            scores = gl.where(key[None, :] <= last[:, None], scores, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        fade = gl.exp2(top - new_top)
        mine = gl.exp2(scores - new_top[:, None]).to(weights.dtype)
        here = weights.index(who * TILES + t + (i >> 30))
        here.store(mine)
        fence_async_shared()
        norm = norm * gl.convert_layout(fade, gl.SliceLayout(1, N_LAYOUT))[:, None]
        norm = warpgroup_mma(here, ones.permute((1, 0)), norm, is_async=True)
        norm = warpgroup_mma_wait(0, deps=(norm,))
        top = new_top
        if t == 1:
            fade1 = fade
        if t == 2:
            fade2 = fade
        if t == 3:
            fade3 = fade
    new_best = gl.maximum(best, top)
    old, new = gl.exp2(best - new_best), gl.exp2(top - new_best)
    norms = norms * old + gl.convert_layout(gl.max(norm, 1), S_ROW) * new
    old = gl.convert_layout(old, O_ROW)[:, None]
    new = gl.convert_layout(new, O_ROW)[:, None]
    for part in gl.static_range(PARTS):
        total = _values(
            weights, who, ring, full, empty, i, at, keys, fade1, fade2, fade3,
            O_LAYOUT, WIDTH, SLOTS, EDGE,
        )  # fmt: skip
        i += TILES
        if part == 0:
            sums0 = sums0 * old + total * new
        if part == 1:
            sums1 = sums1 * old + total * new
        if part == 2:
            sums2 = sums2 * old + total * new
        if part == 3:
            sums3 = sums3 * old + total * new
    return i, new_best, norms, sums0, sums1, sums2, sums3


@gluon.jit
def _attend(
    who, gates, out, queries, weights, ones, ring, full, empty,
    count, start, row, tiles, kv, scale, gate_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr,
    PARTS: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows row .. row + 63 of the (token, head of a group) of one KV head."""
    S_ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out.dtype.element_ty
    last, keys = start + (row + gl.arange(0, 64, S_ROW)) // GROUP, start + count
    best = gl.full((64,), NOTHING, gl.float32, S_ROW)
    norms = gl.zeros((64,), gl.float32, S_ROW)
    sums0 = gl.zeros((64, WIDTH), gl.float32, O_LAYOUT)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    i = 0
    whole = (start + row // GROUP + 1) // (TILES * 64) * TILES
    for base in range(0, whole, TILES):
        i, best, norms, sums0, sums1, sums2, sums3 = _segment(
            queries, weights, ones, who, ring, full, empty, i, base * 64, keys, last, scale,
            best, norms, sums0, sums1, sums2, sums3, WIDTH, PARTS, SLOTS, False,
        )  # fmt: skip
    for base in range(whole, tiles, TILES):
        i, best, norms, sums0, sums1, sums2, sums3 = _segment(
            queries, weights, ones, who, ring, full, empty, i, base * 64, keys, last, scale,
            best, norms, sums0, sums1, sums2, sums3, WIDTH, PARTS, SLOTS, True,
        )  # fmt: skip
    m = row + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
    place = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    mine = (m < count * GROUP)[:, None]
    below = gl.convert_layout(norms, O_ROW)[:, None] + gl.zeros((64, WIDTH), gl.float32, O_LAYOUT)
    for part in gl.static_range(PARTS):
        sums = sums0 if part == 0 else (sums1 if part == 1 else (sums2 if part == 2 else sums3))
        queries.index(who * PARTS + part).store(gl.div_rn(sums, below).to(dtype))
        values = queries.index(who * PARTS + part).load(WIDE)
        column = (part * WIDTH + d)[None, :]
        if GATED:
            gate_at = (m // GROUP * gate_stride + (kv * GROUP + m % GROUP) * 2 * D + D)[:, None]
            gate = gl.load(gates + gate_at + column, mask=mine, other=0.0).to(gl.float32)
            gate = gl.div_rn(gl.full((64, WIDTH), 1.0, gl.float32, WIDE), 1.0 + gl.exp(-gate))
            gate = gate.to(dtype).to(gl.float32)
            values = (values.to(gl.float32) * gate).to(dtype)
        gl.store(out + place[:, None] + column, values, mask=mine)


@gluon.jit(do_not_specialize=["table_stride", "gate_stride"])
def _prompt_kernel(
    q, k_map, v_map, page_table, cu_seqlens, starts, gates, out, scale, table_stride, gate_stride,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr,
    SLOTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """128 rows of (token, head of a group); those that see most keys begin first."""
    GROUP: gl.constexpr = H // HKV
    PARTS: gl.constexpr = D // WIDTH
    dtype: gl.constexpr = out.dtype.element_ty
    s, kv = (gl.program_id(0) // HKV).to(gl.int64), gl.program_id(0) % HKV
    row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128
    first = gl.load(cu_seqlens + s).to(gl.int64)
    count = (gl.load(cu_seqlens + s + 1) - first).to(gl.int32)
    start = gl.load(starts + s).to(gl.int32)
    if row < count * GROUP:
        end = start + gl.minimum(count, (row + 127) // GROUP + 1)
        tiles = (end + 63) // 64
        square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        queries = gl.allocate_shared_memory(dtype, [2 * PARTS, 64, WIDTH], square)
        weights = gl.allocate_shared_memory(dtype, [2 * TILES, 64, 64], square)
        ring = gl.allocate_shared_memory(dtype, [SLOTS, 64, WIDTH], square)
        ones = gl.allocate_shared_memory(dtype, [8, 64], square)
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ones.store(gl.full((8, 64), 1.0, dtype, flat))
        full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLOTS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        q += first * (H * D)
        out += first * (H * D)
        if GATED:
            gates += first * gate_stride
        pages = page_table + s * table_stride
        for half in gl.static_range(2):
            _bring(q, queries, half, row + half * 64, count, kv, H, GROUP, D, WIDTH, PARTS)
        gl.warp_specialize(
            [
                (_attend, (
                    0, gates, out, queries, weights, ones,
                    ring, full, empty, count, start, row, tiles, kv, scale,
                    gate_stride, H, GROUP, D, WIDTH, PARTS, SLOTS, GATED,
                )),
                (_attend, (
                    1, gates, out, queries, weights, ones, ring, full, empty, count, start, row + 64, tiles, kv,
                    scale, gate_stride, H, GROUP, D, WIDTH, PARTS, SLOTS, GATED,
                )),
                (_fetch, (
                    k_map, v_map, ring, full, empty, pages, tiles, kv * D, WIDTH, PARTS, SLOTS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None,
) -> Tensor:
    """paged_attention for head_dim 128 or 256, pages of 64, bf16 or fp16, contiguous caches."""
    (_, heads, dim), kv_heads, rows = q.shape, k_cache.shape[2], starts.shape[0]
    out, width = torch.empty_like(q), min(dim, 128)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    maps = [
        TensorDescriptor.from_tensor(t.view(-1, kv_heads * dim), [TILE, width], layout)
        for t in (k_cache, v_cache)
    ]
    _prompt_kernel[(rows * kv_heads, triton.cdiv(query_len * (heads // kv_heads), 2 * ROWS))](
        q, *maps, page_table, cu_seqlens, starts, gates, out, scale * LOG2E, page_table.stride(0),
        gates.stride(0) if gates is not None else 0,
        heads, kv_heads, dim, width, 6 if dim == 256 else 8, gates is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["width", "table_stride", "entries", "Q"])
def _segment_kernel(
    q, k_map, v_map, page_table, cu_seqlens, starts, tops, norms, parts,
    scale, width, table_stride, entries, Q,
    H: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """One segment for up to 64 rows and COLUMNS of the values: everything is asked for at once."""
    GROUP: gl.constexpr = H // HKV
    PARTS: gl.constexpr = D // WIDTH
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    N_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    s, kv = (gl.program_id(0) // HKV).to(gl.int64), gl.program_id(0) % HKV
    segment, side = gl.program_id(1), gl.program_id(2)
    pages = page_table + s * table_stride
    page0 = gl.load(pages + segment * TILES)
    page1 = gl.load(pages + gl.minimum(segment * TILES + 1, width - 1))
    page2 = gl.load(pages + gl.minimum(segment * TILES + 2, width - 1))
    page3 = gl.load(pages + gl.minimum(segment * TILES + 3, width - 1))
    first = gl.load(cu_seqlens + s).to(gl.int64)
    count = (gl.load(cu_seqlens + s + 1) - first).to(gl.int32)
    start = gl.load(starts + s).to(gl.int32)
    begin, keys = segment * (TILES * 64), start + count
    if (count > 0) & (begin < keys):
        square: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        slim: gl.constexpr = gl.NVMMASharedLayout(COLUMNS * 2 if COLUMNS < 64 else 128, 16, 2)
        queries = gl.allocate_shared_memory(dtype, [PARTS, 64, WIDTH], square)
        all_keys = gl.allocate_shared_memory(dtype, [TILES * PARTS, 64, WIDTH], square)
        values = gl.allocate_shared_memory(dtype, [TILES, 64, COLUMNS], slim)
        ones = gl.allocate_shared_memory(dtype, [8, 64], square)
        come = gl.allocate_shared_memory(gl.int64, [2 * TILES, 1], mbarrier.MBarrierLayout())
        for t in gl.static_range(2 * TILES):
            mbarrier.init(come.index(t), count=1)
        fence_async_shared()
        for t in gl.static_range(TILES):
            page = page0 if t == 0 else (page1 if t == 1 else (page2 if t == 2 else page3))
            here = begin + t * 64 < keys
            mbarrier.expect(come.index(t), 64 * D * 2, pred=here)
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    k_map, [page * 64, kv * D + part * WIDTH], come.index(t),
                    all_keys.index(t * PARTS + part), pred=here,
                )  # fmt: skip
            mbarrier.expect(come.index(TILES + t), 64 * COLUMNS * 2, pred=here)
            tma.async_copy_global_to_shared(
                v_map, [page * 64, kv * D + side * COLUMNS], come.index(TILES + t),
                values.index(t), pred=here,
            )  # fmt: skip
        m = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
        place = ((first + m // GROUP) * H + kv * GROUP + m % GROUP) * D
        mine = (m < count * GROUP)[:, None]
        for part in gl.static_range(PARTS):
            inside = place[:, None] + (part * WIDTH + d)[None, :]
            queries.index(part).store(gl.load(q + inside, mask=mine, other=0.0))
        flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        ones.store(gl.full((8, 64), 1.0, dtype, flat))
        fence_async_shared()
        last = start + gl.arange(0, 64, S_ROW) // GROUP
        key = gl.arange(0, 64, gl.SliceLayout(0, S_LAYOUT))
        top = gl.full((64,), NOTHING, gl.float32, S_ROW)
        norm = gl.zeros((64, 8), gl.float32, N_LAYOUT)
        total = gl.zeros((64, COLUMNS), gl.float32, O_LAYOUT)
        for t in gl.static_range(TILES):
            at = begin + t * 64
            mbarrier.wait(come.index(t), 0, pred=at < keys)
            scores = gl.zeros((64, 64), gl.float32, S_LAYOUT)
            for part in gl.static_range(PARTS):
                scores = warpgroup_mma(
                    queries.index(part), all_keys.index(t * PARTS + part).permute((1, 0)),
                    scores, use_acc=part > 0, is_async=True,
                )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
            scores = gl.where((at + key)[None, :] <= last[:, None], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1))
            fade = gl.exp2(top - new_top)
            weights = gl.exp2(scores - new_top[:, None]).to(dtype)
            mbarrier.wait(come.index(TILES + t), 0, pred=at < keys)
            if at + 64 > keys:
                _clear(values.index(t), keys - at, COLUMNS)
            norm = norm * gl.convert_layout(fade, gl.SliceLayout(1, N_LAYOUT))[:, None]
            total = total * gl.convert_layout(fade, O_ROW)[:, None]
            mine_norm = gl.convert_layout(weights, gl.DotOperandLayout(0, N_LAYOUT, 2))
            norm = warpgroup_mma(mine_norm, ones.permute((1, 0)), norm, is_async=True)
            mine_total = gl.convert_layout(weights, gl.DotOperandLayout(0, O_LAYOUT, 2))
            total = warpgroup_mma(mine_total, values.index(t), total, is_async=True)
            norm, total = warpgroup_mma_wait(0, deps=(norm, total))
            top = new_top
        rows = gl.arange(0, 64, S_ROW)
        line = ((s * Q + rows // GROUP) * entries + segment) * H + kv * GROUP + rows % GROUP
        live = (rows < count * GROUP) & (begin <= last)
        gl.store(tops + line, top, mask=live & (side == 0))
        gl.store(norms + line, gl.convert_layout(gl.max(norm, 1), S_ROW), mask=live & (side == 0))
        column = side * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, O_LAYOUT))
        line, live = gl.convert_layout(line, O_ROW), gl.convert_layout(live, O_ROW)
        gl.store(parts + line[:, None] * D + column[None, :], total, mask=live[:, None])
