# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""paged_attention for long queries on Hopper, in Gluon: triton.py's reduction tree, bit for bit.

A CTA owns 128 (token, query head of the group) rows of one KV head. It is warp-specialized: a
producer warp copies tiles of keys and values by TMA through a multistage pipeline; two consumer
warpgroups of 64 rows each issue the next tile's Q K^T while they run softmax on the current one.

Heads of 128: p goes from registers into P V at once. Heads of 256: the accumulators of a split and
of all splits do not fit the registers together. The p tiles of a split wait in shared memory, and
the split's output is computed 128 columns at a time. See docs/kernels/attention.md.
"""

from typing import Any

import torch
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
from lockstep.kernels.attention.triton import paged_attention_triton, supports
from lockstep.kernels.attention.warpgroup import (
    ACC_LAYOUT,
    ACC_ROWS,
    COPY_LAYOUT,
    QK_ROWS,
    SUM_LAYOUT,
    TILE,
    TILE_COLUMNS,
    TILES_PER_SPLIT,
    cache_descriptors,
    issue_qk,
    load_next_tile,
    load_q_tile,
    release_stage,
    row_sums,
    scale_rows,
    softmax_step,
    split_pv,
    split_softmax,
    wait_tile,
    zero_tail,
)
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.device.softmax import LOG2E, NO_SCORE, combine_sums
from lockstep.kernels.device.tiles import FLAT, SWIZZLED
from lockstep.kernels.integers import ceil_div

CTA_ROWS = 128
"""Rows of a CTA: two warpgroups of 64, the M of a wgmma."""
MIN_QUERY_LEN = 64
"""Tokens per row from which on this kernel is the faster one: times in docs/kernels/attention.md.
"""
NUM_STAGES = {128: 10, 256: 6}
"""Pipeline stages by head dim, 16 KB each: the most that fit next to the other buffers."""


@gluon.jit
def _load_tiles(k_map, v_map, stages, full, empty, pages, tiles, column, PARTS: gl.constexpr):
    """Run the producer warp: copy tiles of keys and values in the order of their use.

    Heads of 128 read the last keys twice: the loop of _attend_128 issues one Q K^T too many.
    """
    i = 0
    if PARTS == 1:
        for t in range(tiles):
            token = gl.load(pages + t) * 64
            i = load_next_tile(k_map, token, column, stages, full, empty, i)
            i = load_next_tile(v_map, token, column, stages, full, empty, i)
        load_next_tile(k_map, gl.load(pages + tiles - 1) * 64, column, stages, full, empty, i)
    else:
        for base in range(0, tiles, TILES_PER_SPLIT):
            end = gl.minimum(base + TILES_PER_SPLIT, tiles)
            for t in range(base, end):
                for part in gl.static_range(PARTS):
                    token = gl.load(pages + t) * 64
                    i = load_next_tile(
                        k_map, token, column + part * TILE_COLUMNS, stages, full, empty, i
                    )
            for part in gl.static_range(PARTS):
                for t in range(base, end):
                    token = gl.load(pages + t) * 64
                    i = load_next_tile(
                        v_map, token, column + part * TILE_COLUMNS, stages, full, empty, i
                    )


@gluon.jit
def _attend_128(
    q_tiles, ones, stages, full, empty, zeroed, tiles, num_keys, last_key, min_last_key, scale,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Attend over all tiles with heads of 128; p stays in registers.

    Returns: row sums [64] and the accumulator [64, 128] over all splits.
    """
    dtype: gl.constexpr = stages.dtype
    all_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
    all_sum = gl.zeros((64,), gl.float32, QK_ROWS)
    all_acc = gl.zeros((64, 128), gl.float32, ACC_LAYOUT)
    row_max = all_max
    row_sum = gl.zeros((64, 8), gl.float32, SUM_LAYOUT)
    acc = all_acc
    scores = warpgroup_mma_wait(0, deps=(issue_qk(q_tiles, stages, full, 0, 1),))
    i = 0
    for t in range(tiles):
        # The scores of tile t are complete, so its keys may be overwritten.
        release_stage(stages, empty, i)
        # Tensor cores run the next Q K^T while this warpgroup computes exp2.
        next_scores = issue_qk(q_tiles, stages, full, i + 2, 1)
        row_max, rescale, p = softmax_step(
            scores, scale, row_max, last_key, min_last_key, t * 64, dtype
        )
        row_sum = scale_rows(row_sum, rescale, SUM_LAYOUT)
        acc = scale_rows(acc, rescale, ACC_LAYOUT)
        # Registers of the accumulator become the A operand of wgmma without shared memory.
        p_operand = gl.convert_layout(p, gl.DotOperandLayout(0, SUM_LAYOUT, 2))
        row_sum = warpgroup_mma(p_operand, ones.permute((1, 0)), row_sum, is_async=True)
        values = wait_tile(stages, full, i + 1)
        if t * 64 + 64 > num_keys:
            # The last page contains stale values, maybe NaN, past the row's end.
            zero_tail(values, num_keys - t * 64, zeroed, 0, WARPGROUP)
        p_operand = gl.convert_layout(p, gl.DotOperandLayout(0, ACC_LAYOUT, 2))
        acc = warpgroup_mma(p_operand, values, acc, is_async=True)
        row_sum, acc, scores = warpgroup_mma_wait(0, deps=(row_sum, acc, next_scores))
        release_stage(stages, empty, i + 1)
        i += 2
        # End of a KV split, an absolute position.
        if ((t + 1) % TILES_PER_SPLIT == 0) | (t + 1 == tiles):
            all_max, all_sum, old_scale, new_scale = combine_sums(
                all_max, all_sum, row_max, row_sums(row_sum)
            )
            all_acc = scale_rows(all_acc, old_scale, ACC_LAYOUT) + scale_rows(
                acc, new_scale, ACC_LAYOUT
            )
            row_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
            row_sum = gl.zeros((64, 8), gl.float32, SUM_LAYOUT)
            acc = gl.zeros((64, 128), gl.float32, ACC_LAYOUT)
    return all_sum, all_acc


@gluon.jit
def _attend_256(
    q_tiles, p_tiles, rescales, ones, stages, full, empty, zeroed, tiles, num_keys, last_key,
    min_last_key, scale, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Attend over all splits with heads of 256.

    Returns: row sums [64] and the accumulators of columns 0 .. 127 and 128 .. 255.
    """
    all_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
    all_sum = gl.zeros((64,), gl.float32, QK_ROWS)
    acc_low = gl.zeros((64, 128), gl.float32, ACC_LAYOUT)
    acc_high = acc_low
    i = 0
    for base in range(0, tiles, TILES_PER_SPLIT):
        first_key = base * 64
        count = gl.minimum(TILES_PER_SPLIT, tiles - base)
        i, row_max, row_sum = split_softmax(
            q_tiles, p_tiles, rescales, ones, stages, full, empty, i, count, last_key, min_last_key,
            first_key, scale, 2,
        )  # fmt: skip
        all_max, all_sum, old_scale, new_scale = combine_sums(
            all_max, all_sum, row_max, row_sums(row_sum)
        )
        # Both halves of the columns read the same p tiles from shared memory.
        acc = split_pv(
            p_tiles, rescales, stages, full, empty, zeroed, i, count, first_key, num_keys, 0,
            WARPGROUP,
        )  # fmt: skip
        acc_low = scale_rows(acc_low, old_scale, ACC_LAYOUT) + scale_rows(
            acc, new_scale, ACC_LAYOUT
        )
        # Added before the next chain takes registers.
        acc_low = warpgroup_mma_wait(0, deps=(acc_low,))
        acc = split_pv(
            p_tiles, rescales, stages, full, empty, zeroed, i + count, count, first_key, num_keys,
            1, WARPGROUP,
        )  # fmt: skip
        acc_high = scale_rows(acc_high, old_scale, ACC_LAYOUT) + scale_rows(
            acc, new_scale, ACC_LAYOUT
        )
        acc_high = warpgroup_mma_wait(0, deps=(acc_high,))
        i += 2 * count
    return all_sum, acc_low, acc_high


@gluon.jit
def _store_gated(
    block, gates, out, first_row, count, kv, column, gate_stride,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Store 128 columns of the rounded output, times the rounded output gate."""
    m = first_row + gl.arange(0, 64, gl.SliceLayout(1, COPY_LAYOUT))
    token = m // GROUP
    head = kv * GROUP + m % GROUP
    row_mask = (m < count * GROUP)[:, None]
    column = (column + gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, COPY_LAYOUT)))[None, :]
    # Through shared memory to 16-byte vectors: the accumulator's layout would store 4 bytes a
    # thread.
    values = block.load(COPY_LAYOUT)
    if GATED:
        gate_offsets = (token * gate_stride + (head * 2 + 1) * D)[:, None] + column
        gate = gl.load(gates + gate_offsets, mask=row_mask, other=0.0).to(gl.float32)
        one = gl.full((64, TILE_COLUMNS), 1.0, gl.float32, COPY_LAYOUT)
        gate = gl.div_rn(
            one, 1.0 + gl.exp(-gate)
        )  # the same operations as sigmoid of the activations
        gate = gate.to(gates.dtype.element_ty).to(gl.float32)
        values = (values.to(gl.float32) * gate).to(values.dtype)
    gl.store(out + ((token * H + head) * D)[:, None] + column, values, mask=row_mask)


@gluon.jit
def _store_fp32(
    acc, out, first_row, count, kv, column, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr
):
    """Store 128 columns of the fp32 output, neither rounded nor gated."""
    m = first_row + gl.arange(0, 64, ACC_ROWS)
    column = column + gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, ACC_LAYOUT))
    offsets = (m // GROUP * H + kv * GROUP + m % GROUP) * D
    gl.store(out + (offsets[:, None] + column[None, :]), acc, mask=(m < count * GROUP)[:, None])


@gluon.jit
def _consumer(
    q_tiles, p_tiles, rescales, ones, stages, full, empty, zeroed, gates, out, count, start,
    first_row, tiles, kv, scale, gate_stride, WARPGROUP: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup number WARPGROUP of two: rows first_row .. first_row + 63."""
    last_key = start + (first_row + gl.arange(0, 64, QK_ROWS)) // GROUP
    num_keys = start + count
    min_last_key = start + first_row // GROUP
    if D == 128:
        all_sum, acc_low = _attend_128(
            q_tiles, ones, stages, full, empty, zeroed, tiles, num_keys, last_key, min_last_key,
            scale, WARPGROUP,
        )  # fmt: skip
    else:
        all_sum, acc_low, acc_high = _attend_256(
            q_tiles, p_tiles, rescales, ones, stages, full, empty, zeroed, tiles, num_keys,
            last_key, min_last_key, scale, WARPGROUP,
        )  # fmt: skip
    # Correctly rounded reciprocal, as in triton.py.
    inverse = gl.div_rn(gl.full((64,), 1.0, gl.float32, QK_ROWS), all_sum)
    acc_low = scale_rows(acc_low, inverse, ACC_LAYOUT)
    if D > TILE_COLUMNS:
        acc_high = scale_rows(acc_high, inverse, ACC_LAYOUT)
    if out.dtype.element_ty == gl.float32:
        _store_fp32(acc_low, out, first_row, count, kv, 0, H, GROUP, D)
        if D > TILE_COLUMNS:
            _store_fp32(acc_high, out, first_row, count, kv, TILE_COLUMNS, H, GROUP, D)
    else:
        # The query tile is free by now and buffers the output.
        q_tiles.index(0).store(acc_low.to(q_tiles.dtype))
        if D > TILE_COLUMNS:
            q_tiles.index(1).store(acc_high.to(q_tiles.dtype))
        for part in range(D // TILE_COLUMNS):
            _store_gated(
                q_tiles.index(part), gates, out, first_row, count, kv, part * TILE_COLUMNS,
                gate_stride, H, GROUP, D, GATED,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q, k_map, v_map, page_table, cu_seqlens, starts, gates, out, scale, table_stride, gate_stride,
    H: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    NUM_STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Attend with 128 (token, query head) rows; CTAs that see most keys start first.

    H: query heads in memory. HKV: KV heads of the caches, each of which GROUP query heads read. An
    `out` of fp32 is stored without rounding and gate.
    """
    pdl_start()
    PARTS: gl.constexpr = D // TILE_COLUMNS
    dtype: gl.constexpr = q.dtype.element_ty
    s = (gl.program_id(0) // HKV).to(gl.int64)
    kv = gl.program_id(0) % HKV
    # Descending: the longest CTAs, at the end of the prompt, start first.
    first_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * 128
    first, count, start = row_of(cu_seqlens, starts, s)
    if first_row < count * GROUP:
        tiles = (start + gl.minimum(count, (first_row + 127) // GROUP + 1) + 63) // 64
        q_tiles = gl.allocate_shared_memory(dtype, [PARTS, 64, TILE_COLUMNS], SWIZZLED)
        q_tiles2 = gl.allocate_shared_memory(dtype, [PARTS, 64, TILE_COLUMNS], SWIZZLED)
        stages = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, TILE_COLUMNS], SWIZZLED)
        ones = gl.allocate_shared_memory(dtype, [8, 64], SWIZZLED)
        p_tiles = q_tiles
        p_tiles2 = q_tiles2
        rescales = q_tiles
        rescales2 = q_tiles2
        if PARTS > 1:
            p_tiles = gl.allocate_shared_memory(dtype, [TILES_PER_SPLIT, 64, 64], SWIZZLED)
            p_tiles2 = gl.allocate_shared_memory(dtype, [TILES_PER_SPLIT, 64, 64], SWIZZLED)
            rescales = gl.allocate_shared_memory(gl.float32, [3, 64], FLAT)
            rescales2 = gl.allocate_shared_memory(gl.float32, [3, 64], FLAT)
        full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(zeroed, count=2)  # both warpgroups, each for its half of a tile
        for i in gl.static_range(NUM_STAGES):
            mbarrier.init(full.index(i), count=1)  # the producer; TMA adds the bytes
            # Two readers: a stage is free when both warpgroups have released it.
            mbarrier.init(empty.index(i), count=2)
        ones.store(gl.full((8, 64), 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
        q += first * (H * D)
        out += first * (H * D)
        if GATED:
            gates += first * gate_stride
        load_q_tile(q, q_tiles, first_row, count, kv, H, GROUP, D)
        load_q_tile(q, q_tiles2, first_row + 64, count, kv, H, GROUP, D)
        # wgmma reads the queries and ones through the async proxy.
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    q_tiles, p_tiles, rescales, ones, stages, full, empty, zeroed, gates, out,
                    count, start, first_row, tiles, kv, scale, gate_stride, 0, H, GROUP, D, GATED,
                )),
                (_consumer, (
                    q_tiles2, p_tiles2, rescales2, ones, stages, full, empty, zeroed, gates, out,
                    count, start, first_row + 64, tiles, kv, scale, gate_stride, 1, H, GROUP, D,
                    GATED,
                )),
                (_load_tiles, (
                    k_map, v_map, stages, full, empty, page_table + s * table_stride, tiles, kv * D,
                    PARTS,
                )),
            ],
            [4, 1],
            # Registers per thread: consumers 240, the producer warp 24.
            [240, 24],
        )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    if traits.get("head_dim", 64) not in (128, 256):
        return "head_dim is neither 128 nor 256"
    if traits.get("quantizers") is not None:
        return "TMA copies tiles of the model's dtype, and this cache is quantized"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "p is multiplied in bf16 or fp16"
    reason = supports(**traits)
    if reason is None and resolve_architecture(**traits) != HOPPER:
        return "wgmma exists on Hopper only"
    return reason


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, query_len: int) -> bool:
    """Return whether this kernel serves a step: long queries, pages of TILE, contiguous caches."""
    contiguous = k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape[1] == TILE
    return query_len >= MIN_QUERY_LEN and contiguous and len(q) > 0


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
    """Run paged_attention. Steps that do not fit go through triton.py."""
    if not fits(q, k_cache, v_cache, query_len):
        return paged_attention_triton(
            q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
        )
    out = torch.empty_like(q)
    launch_prefill(
        q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates, out, 0
    )
    return out


def launch_prefill(
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
    """Launch the kernel over caches of some KV heads of the layer.

    first: the first KV head. kv_heads: KV heads of the layer; None: those of the caches. out: fp32
    output is neither rounded nor gated.
    """
    _, heads, dim = q.shape
    cache_kv_heads = k_cache.shape[2]
    group = heads // (kv_heads or cache_kv_heads)
    rows = starts.shape[0]
    kernel_gates = gates if out.dtype == q.dtype else None
    is_gated = kernel_gates is not None
    gate_stride = 0
    if kernel_gates is not None:
        gate_stride = kernel_gates.stride(0)
        kernel_gates = kernel_gates[:, 2 * first * group * dim :]
    _prefill_kernel[(rows * cache_kv_heads, ceil_div(query_len * group, CTA_ROWS))](
        q[:, first * group :], *cache_descriptors(k_cache, v_cache), page_table, cu_seqlens, starts,
        kernel_gates, out[:, first * group :],
        scale * LOG2E, page_table.stride(0), gate_stride,
        heads, cache_kv_heads, group, dim, NUM_STAGES[dim], is_gated,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
