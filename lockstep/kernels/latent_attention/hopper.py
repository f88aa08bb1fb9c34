# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""latent_attention on Hopper, in Gluon: triton.py's reduction tree, bit for bit.

A CTA processes 64 (token, head) rows at a time, one work item after another. It is
warp-specialized: a producer warp copies tiles of 64 latents by TMA into two stages of shared
memory, each once for both uses, as key and as value. One warpgroup computes Q K^T and softmax of a
tile. Two more multiply p with the tile as values, each with 256 of the 512 columns, while the first
one computes the scores of the next tile. p overwrites the tile's rotary keys. The accumulator of a
split is in registers; those of a span and of all spans are in global memory, touched once per
split. See docs/kernels/latent_attention.md.
"""

from typing import Any

import torch
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

from lockstep.kernels.architecture import HOPPER, multiprocessor_count
from lockstep.kernels.backends import resolve_architecture
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.softmax import (
    LOG2E,
    NO_SCORE,
    combine_sums,
    exponentiate,
    mask_scores,
)
from lockstep.kernels.device.tiles import (
    FLAT,
    SWIZZLED,
    tile_descriptor,
    tma_load_tile,
    zero_tail_rows,
)
from lockstep.kernels.formats.kv import KVCache, QuantizedKV
from lockstep.kernels.integers import ceil_div
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.latent_attention.dequantize import dequantized_groups
from lockstep.kernels.latent_attention.triton import (
    Partition,
    choose_partition,
    choose_tile,
    combine_partials,
    latent_attention_triton,
    supports,
)

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
HALF = gl.constexpr(256)
"""Columns of a latent, of its rotary key, and of half a latent: those that a warpgroup accumulates,
or both warpgroups where two CTAs share the columns. They are split over two accumulators: ptxas
refuses 256 columns where a CTA has 16 warps."""
NUM_STAGES = gl.constexpr(2)
"""Pipeline stages in shared memory, 72 KB each, next to as many bytes of queries."""
QK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUM_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
QK_ROWS = gl.constexpr(gl.SliceLayout(1, QK_LAYOUT.value))
"""Register layouts of the softmax warpgroup: scores, row sums, one number per row."""


@gluon.constexpr_function
def _output_layout(column_parts):
    """Return the register layout of one of a warpgroup's two accumulators."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 // column_parts, 16])


@gluon.jit
def _work_item(
    item, cu_seqlens, starts, blocks, parallel, H: gl.constexpr, COLUMN_PARTS: gl.constexpr,
    KV_SPLIT: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR: gl.constexpr, SPAN: gl.constexpr,
    COMBINES: gl.constexpr,
):  # fmt: skip
    """Decode a work item: 64 (token, head) rows of a batch row, a part of their columns, and a lane
    of units.

    Items that see most keys come first; items of the same keys are adjacent, so that they share
    them in the L2.

    Returns: batch row; first of its (token, head) rows and the end of the rows of its kind
    (device.block_of); lane of units; part of the columns; the row's first token, token count and
    start; end of the keys that the item sees, 0 where it has no tokens; keys of a split and of a
    unit.
    """
    column_part = item % COLUMN_PARTS
    block = blocks - 1 - item // COLUMN_PARTS % blocks
    unit_lane = item // (COLUMN_PARTS * blocks) % parallel
    s = item // (COLUMN_PARTS * blocks * parallel)
    first = gl.load(cu_seqlens + s)
    count = gl.load(cu_seqlens + s + 1) - first
    start = gl.load(starts + s)
    near_rows = gl.minimum(gl.maximum(FAR - start, 0), count) * H
    near_blocks = (near_rows + 63) // 64
    is_far = block >= near_blocks
    first_row = gl.where(is_far, near_rows + (block - near_blocks) * 64, block * 64)
    row_end = gl.where(is_far, count * H, near_rows)
    end = start + (gl.minimum(first_row + 64, row_end) - 1) // H + 1
    end = gl.where(first_row < row_end, end, 0)
    split = gl.where(is_far, KV_SPLIT, NEAR_SPLIT)
    unit = split
    if COMBINES:
        unit = split * 0 + SPAN
    return s, first_row, row_end, unit_lane, column_part, first, count, start, end, split, unit


@gluon.jit
def _load_tiles(
    q_map, q_rope_map, latent_map, rope_map, q_tiles, q_rope, q_full, q_empty, latent_stages,
    rope_stages, full, empty, page_table, cu_seqlens, starts, table_stride, items, blocks, parallel,
    H: gl.constexpr, COLUMN_PARTS: gl.constexpr, KV_SPLIT: gl.constexpr, NEAR_SPLIT: gl.constexpr,
    FAR: gl.constexpr, SPAN: gl.constexpr, COMBINES: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: per item the queries, then the tiles in the order of their use."""
    i = 0
    q_round = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        (
            s, first_row, row_end, unit_lane, column_part, first, count, start, end, split,
            unit_size,
        ) = _work_item(
            item, cu_seqlens, starts, blocks, parallel, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
            SPAN, COMBINES,
        )  # fmt: skip
        if unit_lane * unit_size < end:
            at_row = first * H + first_row
            # The queries of the item before are no longer read.
            mbarrier.wait(q_empty, (q_round & 1) ^ 1)
            mbarrier.expect(q_full, 64 * (LATENT + ROPE) * 2)
            tma.async_copy_global_to_shared(q_map, [at_row, 0], q_full, q_tiles.index(0))
            tma.async_copy_global_to_shared(q_map, [at_row, HALF], q_full, q_tiles.index(1))
            tma.async_copy_global_to_shared(q_rope_map, [at_row, 0], q_full, q_rope.index(0))
            q_round += 1
            page_table_row = page_table + s.to(gl.int64) * table_stride
            for unit in range(unit_lane * unit_size, end, parallel * unit_size):
                for first_key in range(unit, gl.minimum(end, unit + unit_size), 64):
                    # Pages have 64 tokens: a tile is a page.
                    token = gl.load(page_table_row + first_key // 64) * 64
                    stage = i % NUM_STAGES
                    phase = i // NUM_STAGES & 1
                    # A barrier per half: P V of one half may release it before the other.
                    for half in gl.static_range(2):
                        barrier = stage * 2 + half
                        tma_load_tile(
                            latent_map, token, half * HALF, latent_stages.index(barrier),
                            full.index(barrier), empty.index(barrier), phase,
                        )  # fmt: skip
                    barrier = NUM_STAGES * 2 + stage
                    tma_load_tile(
                        rope_map, token, 0, rope_stages.index(stage), full.index(barrier),
                        empty.index(barrier), phase,
                    )  # fmt: skip
                    i += 1


@gluon.jit
def _issue_qk(q_tiles, q_rope, latent_stages, rope_stages, full, i):
    """Issue Q K^T of the i-th tile [64, 64]; warpgroup_mma_wait completes it.

    i >> 30 is 0. It makes addresses depend on i, so that the compiler does not keep them in
    registers across the loop.
    """
    stage = i % NUM_STAGES
    phase = i // NUM_STAGES & 1
    scores = gl.zeros((64, 64), gl.float32, QK_LAYOUT)
    for half in gl.static_range(2):
        mbarrier.wait(full.index(stage * 2 + half), phase)
        k_tile = latent_stages.index(stage * 2 + half).permute((1, 0))
        q = q_tiles.index(half + (i >> 30))
        scores = warpgroup_mma(q, k_tile, scores, use_acc=half > 0, is_async=True)
    mbarrier.wait(full.index(NUM_STAGES * 2 + stage), phase)
    k_tile = rope_stages.index(stage).permute((1, 0))
    return warpgroup_mma(q_rope.index(i >> 30), k_tile, scores, is_async=True)


@gluon.jit
def _softmax_tile(
    scores, rope_stages, rescales, p_full, ones, i, scale, row_max, row_sum, last_key, min_last_key,
    first_key,
):  # fmt: skip
    """Run online softmax on a tile: store p to shared memory, issue its row sums."""
    stage = i % NUM_STAGES
    scores = mask_scores(scores * scale, last_key, min_last_key, first_key, QK_LAYOUT)
    new_max, rescale, p = exponentiate(scores, row_max, rope_stages.dtype)
    # p takes the place of the rotary keys, which Q K^T has just consumed.
    rope_stages.index(stage).store(p)
    rescales.index(stage).store(rescale)
    # wgmma reads p through the async proxy.
    fence_async_shared()
    # The P V warpgroups may start on this tile.
    mbarrier.arrive(p_full.index(stage))
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, SUM_LAYOUT))[:, None]
    row_sum = warpgroup_mma(rope_stages.index(stage), ones.permute((1, 0)), row_sum, is_async=True)
    return new_max, row_sum


@gluon.jit
def _split_softmax(
    q_tiles, q_rope, latent_stages, rope_stages, full, empty, rescales, p_full, ones, i, tiles,
    last_key, min_last_key, first_key, scale,
):  # fmt: skip
    """Run softmax on the tiles of a KV split. Returns: next pipeline index, row_max, row_sum."""
    row_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
    row_sum = gl.zeros((64, 8), gl.float32, SUM_LAYOUT)
    scores = _issue_qk(q_tiles, q_rope, latent_stages, rope_stages, full, i)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    for t in range(tiles - 1):
        row_max, row_sum = _softmax_tile(
            scores, rope_stages, rescales, p_full, ones, i, scale, row_max, row_sum, last_key,
            min_last_key, first_key + t * 64,
        )  # fmt: skip
        scores = _issue_qk(q_tiles, q_rope, latent_stages, rope_stages, full, i + 1)
        row_sum, scores = warpgroup_mma_wait(0, deps=(row_sum, scores))
        # Row sums have read p: one of three releases of the rope stage.
        mbarrier.arrive(empty.index(NUM_STAGES * 2 + i % NUM_STAGES))
        i += 1
    row_max, row_sum = _softmax_tile(
        scores, rope_stages, rescales, p_full, ones, i, scale, row_max, row_sum, last_key,
        min_last_key, first_key + (tiles - 1) * 64,
    )  # fmt: skip
    row_sum = warpgroup_mma_wait(0, deps=(row_sum,))
    mbarrier.arrive(empty.index(NUM_STAGES * 2 + i % NUM_STAGES))
    return i + 1, row_max, gl.convert_layout(gl.max(row_sum, 1), QK_ROWS)


@gluon.jit
def _softmax_warpgroup(
    q_tiles, q_rope, q_full, q_empty, latent_stages, rope_stages, full, empty, rescales, p_full,
    ones, factors, factors_full, factors_empty, cu_seqlens, starts, partial_max, partial_sum, scale,
    items, blocks, parallel, num_partials, QUERY_LEN, H: gl.constexpr, COLUMN_PARTS: gl.constexpr,
    KV_SPLIT: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR: gl.constexpr, SPAN: gl.constexpr,
    COMBINES: gl.constexpr, FINISHES: gl.constexpr,
):  # fmt: skip
    """Run the softmax warpgroup, which also computes everything that is one number per row."""
    i = 0
    q_round = 0
    split_round = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        (
            s, first_row, row_end, unit_lane, column_part, first, count, start, end, split,
            unit_size,
        ) = _work_item(
            item, cu_seqlens, starts, blocks, parallel, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
            SPAN, COMBINES,
        )  # fmt: skip
        if unit_lane * unit_size < end:
            m = first_row + gl.arange(0, 64, QK_ROWS)
            last_key = start + m // H
            min_last_key = start + first_row // H
            mbarrier.wait(q_full, q_round & 1)
            all_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
            all_sum = gl.zeros((64,), gl.float32, QK_ROWS)
            for unit in range(unit_lane * unit_size, end, parallel * unit_size):
                stop = gl.minimum(end, unit + unit_size)
                unit_max = gl.full((64,), NO_SCORE, gl.float32, QK_ROWS)
                unit_sum = gl.zeros((64,), gl.float32, QK_ROWS)
                for first_key in range(unit, stop, split):
                    tiles = (gl.minimum(stop - first_key, split) + 63) // 64
                    i, row_max, row_sum = _split_softmax(
                        q_tiles, q_rope, latent_stages, rope_stages, full, empty, rescales, p_full,
                        ones, i, tiles, last_key, min_last_key, first_key, scale,
                    )  # fmt: skip
                    if COMBINES:
                        unit_max, unit_sum, old_scale, new_scale = combine_sums(
                            unit_max, unit_sum, row_max, row_sum
                        )
                        # Both P V warpgroups have read the factors of the split before.
                        mbarrier.wait(factors_empty, (split_round & 1) ^ 1)
                        factors.index(0).store(old_scale)
                        factors.index(1).store(new_scale)
                        if FINISHES:
                            if first_key + split >= stop:
                                all_max, all_sum, old_scale, new_scale = combine_sums(
                                    all_max, all_sum, unit_max, unit_sum
                                )
                                one = gl.full((64,), 1.0, gl.float32, QK_ROWS)
                                factors.index(2).store(old_scale)
                                factors.index(3).store(new_scale)
                                # Reciprocal of the row sum, correctly rounded, as in triton.py.
                                factors.index(4).store(gl.div_rn(one, all_sum))
                        mbarrier.arrive(factors_full)
                        split_round += 1
                    else:
                        unit_max = row_max
                        unit_sum = row_sum
                if not FINISHES:
                    # Of CTAs that share the columns one stores the row statistics.
                    stores = (m < row_end) & (unit <= last_key) & (column_part == 0)
                    query = s.to(gl.int64) * QUERY_LEN + m // H
                    partial = query * num_partials * H + unit // unit_size * H + m % H
                    gl.store(partial_max + partial, unit_max, mask=stores)
                    gl.store(partial_sum + partial, unit_sum, mask=stores)
            mbarrier.arrive(q_empty)
            q_round += 1


@gluon.jit
def _zero_tail(tile, live):
    """Zero this warpgroup's columns of a tile from key `live` on."""
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // tile.shape[1], tile.shape[1] // 8], [4, 1], [1, 0]
    )
    for part in gl.static_range(4):
        zero_tail_rows(tile.slice(part * 16, 16), part * 16, live, wide)
    fence_async_shared()


@gluon.jit
def _split_pv(
    latent_stages, p_tiles, full, empty, rescales, p_full, i, tiles, first_key, num_keys,
    column_part, WARPGROUP: gl.constexpr, COLUMN_PARTS: gl.constexpr,
):  # fmt: skip
    """Return this warpgroup's columns of the split's accumulator, [64, COLUMNS] twice.

    A chain over the split's tiles. Where the CTA has half of the columns, both warpgroups read the
    same half of a tile, and both release all of it.
    """
    COLUMNS: gl.constexpr = 128 // COLUMN_PARTS
    layout: gl.constexpr = _output_layout(COLUMN_PARTS)
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    acc_low = gl.zeros((64, COLUMNS), gl.float32, layout)
    acc_high = gl.zeros((64, COLUMNS), gl.float32, layout)
    for t in range(tiles):
        stage = i % NUM_STAGES
        phase = i // NUM_STAGES & 1
        if COLUMN_PARTS == 1:
            half = stage * 2 + WARPGROUP
            values = latent_stages.index(half)
        else:
            half = stage * 2 + column_part
            values = latent_stages.index(half).slice(WARPGROUP * 128, 128, 1)
        mbarrier.wait(full.index(half), phase)
        # Also orders the rescale factor, which was stored before p.
        mbarrier.wait(p_full.index(stage), phase)
        # Only the row's last page contains stale tokens.
        if first_key + t * 64 + 64 > num_keys:
            _zero_tail(values, num_keys - first_key - t * 64)
        rescale = rescales.index(stage).load(row_layout)[:, None]
        acc_low *= rescale
        acc_high *= rescale
        p_tile = p_tiles.index(stage)
        acc_low = warpgroup_mma(p_tile, values.slice(0, COLUMNS, 1), acc_low, is_async=True)
        acc_high = warpgroup_mma(p_tile, values.slice(COLUMNS, COLUMNS, 1), acc_high, is_async=True)
        acc_low, acc_high = warpgroup_mma_wait(0, deps=(acc_low, acc_high))
        mbarrier.arrive(empty.index(stage * 2 + WARPGROUP))
        if COLUMN_PARTS > 1:
            mbarrier.arrive(empty.index(stage * 2 + 1 - WARPGROUP))
        # p has been read: second and third release of the rope stage.
        mbarrier.arrive(empty.index(NUM_STAGES * 2 + stage))
        i += 1
    return acc_low, acc_high


@gluon.jit
def _rescale_and_add(acc, stored, has_stored, factors, FIRST: gl.constexpr):
    """Rescale the accumulator stored at the pointers, if there is one, and acc [64, 128], and add
    them."""
    # Zeros for the first split: rescaled by a finite factor they add nothing.
    previous = gl.zeros_like(acc)
    if has_stored:
        previous = gl.load(stored)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    old_scale = factors.index(FIRST).load(row_layout)
    new_scale = factors.index(FIRST + 1).load(row_layout)
    return previous * old_scale[:, None] + acc * new_scale[:, None]


@gluon.jit
def _finish_split(
    acc, accumulators, factors, first_key, unit, split, stop, end, out_rows, stores,
    SPAN: gl.constexpr, COMBINES: gl.constexpr, FINISHES: gl.constexpr,
):  # fmt: skip
    """Combine columns of a split's accumulator into its span; at a span's end, store it as a
    partial or combine it into that of all spans.

    accumulators: the CTA's accumulators of a span and of all spans, in register order. out_rows:
    pointers to rows of the partials, or of out.
    """
    layout: gl.constexpr = acc.type.layout
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    lane_row = gl.arange(0, 64, row_layout)
    c = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    offsets = (lane_row // 8 * (LATENT * 8) + lane_row % 8 * 8)[:, None] + (c // 8 * 64 + c % 8)[
        None, :
    ]
    if COMBINES:
        span_ptrs = accumulators + offsets
        acc = _rescale_and_add(acc, span_ptrs, first_key > unit, factors, 0)
        if first_key + split < stop:
            gl.store(span_ptrs, acc)
    # End of the unit.
    if first_key + split >= stop:
        if FINISHES:
            all_ptrs = accumulators + 64 * LATENT + offsets
            acc = _rescale_and_add(acc, all_ptrs, unit > 0, factors, 2)
            if unit + SPAN < end:
                gl.store(all_ptrs, acc)
            else:
                acc = acc * factors.index(4).load(row_layout)[:, None]
                rounded = acc.to(out_rows.dtype.element_ty)
                gl.store(out_rows[:, None] + c[None, :], rounded, mask=stores[:, None])
        else:
            gl.store(out_rows[:, None] + c[None, :], acc, mask=stores[:, None])


@gluon.jit
def _pv_warpgroup(
    latent_stages, p_tiles, full, empty, rescales, p_full, factors, factors_full, factors_empty,
    cu_seqlens, starts, partial_acc, out, accumulators, items, blocks, parallel, num_partials,
    QUERY_LEN, WARPGROUP: gl.constexpr, H: gl.constexpr, COLUMN_PARTS: gl.constexpr,
    KV_SPLIT: gl.constexpr, NEAR_SPLIT: gl.constexpr, FAR: gl.constexpr, SPAN: gl.constexpr,
    COMBINES: gl.constexpr, FINISHES: gl.constexpr,
):  # fmt: skip
    """Run a P V warpgroup, which owns half WARPGROUP of the CTA's columns.

    accumulators [2, 64, 512]: the CTA's. split_round >> 30 is 0: see _issue_qk.
    """
    i = 0
    split_round = 0
    WIDTH: gl.constexpr = HALF // COLUMN_PARTS
    COLUMNS: gl.constexpr = WIDTH // 2
    row_layout: gl.constexpr = gl.SliceLayout(1, _output_layout(COLUMN_PARTS))
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        (
            s, first_row, row_end, unit_lane, column_part, first, count, start, end, split,
            unit_size,
        ) = _work_item(
            item, cu_seqlens, starts, blocks, parallel, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
            SPAN, COMBINES,
        )  # fmt: skip
        if unit_lane * unit_size < end:
            column = column_part * HALF + WARPGROUP * WIDTH
            for unit in range(unit_lane * unit_size, end, parallel * unit_size):
                stop = gl.minimum(end, unit + unit_size)
                for first_key in range(unit, stop, split):
                    tiles = (gl.minimum(stop - first_key, split) + 63) // 64
                    acc_low, acc_high = _split_pv(
                        latent_stages, p_tiles, full, empty, rescales, p_full, i, tiles, first_key,
                        start + count, column_part, WARPGROUP, COLUMN_PARTS,
                    )  # fmt: skip
                    i += tiles
                    m = first_row + (split_round >> 30) + gl.arange(0, 64, row_layout)
                    stores = m < row_end
                    if FINISHES:
                        out_rows = out + column + (first.to(gl.int64) * H + m) * LATENT
                    else:
                        stores = stores & (unit <= start + m // H)
                        partial = (s.to(gl.int64) * QUERY_LEN + m // H) * num_partials * H
                        out_rows = (
                            partial_acc
                            + column
                            + (partial + unit // unit_size * H + m % H) * LATENT
                        )
                    if COMBINES:
                        mbarrier.wait(factors_full, split_round & 1)
                    own_accumulators = accumulators + column * 8 + (split_round >> 30)
                    _finish_split(
                        acc_low, own_accumulators, factors, first_key, unit, split, stop, end,
                        out_rows, stores, SPAN, COMBINES, FINISHES,
                    )  # fmt: skip
                    _finish_split(
                        acc_high, own_accumulators + COLUMNS * 8, factors, first_key, unit, split,
                        stop, end, out_rows + COLUMNS, stores, SPAN, COMBINES, FINISHES,
                    )  # fmt: skip
                    if COMBINES:
                        mbarrier.arrive(factors_empty)
                    split_round += 1


@gluon.jit
def _init_barriers(
    full, empty, p_full, q_full, q_empty, factors_full, factors_empty, COLUMN_PARTS: gl.constexpr
):  # fmt: skip
    """Initialize each barrier with its number of arrivals."""
    for stage in gl.static_range(NUM_STAGES * 2):
        # The producer's arrival; TMA adds the bytes.
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=COLUMN_PARTS)
    for stage in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(NUM_STAGES * 2 + stage), count=1)
        # Rope stages hold p: the softmax warpgroup and two P V warpgroups release them.
        mbarrier.init(empty.index(NUM_STAGES * 2 + stage), count=3)
        mbarrier.init(p_full.index(stage), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(factors_full, count=1)
    # Two P V warpgroups read the factors.
    mbarrier.init(factors_empty, count=2)


@gluon.jit(
    do_not_specialize=["table_stride", "items", "blocks", "parallel", "num_partials", "QUERY_LEN"],
)
def _latent_kernel(
    q_map, q_rope_map, latent_map, rope_map, page_table, cu_seqlens, starts, out, partial_max,
    partial_sum, partial_acc, accumulators, scale, table_stride, items, blocks, parallel,
    num_partials, QUERY_LEN, H: gl.constexpr, COLUMN_PARTS: gl.constexpr, KV_SPLIT: gl.constexpr,
    NEAR_SPLIT: gl.constexpr, FAR: gl.constexpr, SPAN: gl.constexpr, COMBINES: gl.constexpr,
    FINISHES: gl.constexpr,
):  # fmt: skip
    """Attend with every num_programs(0)-th work item (persistent CTAs).

    An item is 64 (token, head) rows of a batch row, one of COLUMN_PARTS parts of their columns, and
    every `parallel`-th of their units: splits or, where it COMBINES, spans of keys. Each unit is
    stored as a partial or, where it FINISHES, combined into the output.
    """
    pdl_start()
    dtype: gl.constexpr = out.dtype.element_ty
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, HALF], SWIZZLED)
    q_rope = gl.allocate_shared_memory(dtype, [1, 64, ROPE], SWIZZLED)
    latent_stages = gl.allocate_shared_memory(dtype, [NUM_STAGES * 2, 64, HALF], SWIZZLED)
    rope_stages = gl.allocate_shared_memory(dtype, [NUM_STAGES, 64, ROPE], SWIZZLED)
    ones = gl.allocate_shared_memory(dtype, [8, 64], SWIZZLED)
    rescales = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 64], FLAT)
    factors = gl.allocate_shared_memory(gl.float32, [5, 64], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES * 3, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES * 3, 1], barriers)
    p_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barriers)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    factors_full = gl.allocate_shared_memory(gl.int64, [1], barriers)
    factors_empty = gl.allocate_shared_memory(gl.int64, [1], barriers)
    _init_barriers(full, empty, p_full, q_full, q_empty, factors_full, factors_empty, COLUMN_PARTS)
    ones.store(gl.full((8, 64), 1.0, dtype, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    accumulators += gl.program_id(0).to(gl.int64) * (2 * 64 * LATENT)
    gl.warp_specialize(
        [
            (_softmax_warpgroup, (
                q_tiles, q_rope, q_full, q_empty, latent_stages, rope_stages, full, empty, rescales,
                p_full, ones, factors, factors_full, factors_empty, cu_seqlens, starts, partial_max,
                partial_sum, scale, items, blocks, parallel, num_partials, QUERY_LEN, H,
                COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR, SPAN, COMBINES, FINISHES,
            )),
            (_pv_warpgroup, (
                latent_stages, rope_stages, full, empty, rescales, p_full, factors, factors_full,
                factors_empty, cu_seqlens, starts, partial_acc, out, accumulators, items, blocks,
                parallel, num_partials, QUERY_LEN, 0, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
                SPAN, COMBINES, FINISHES,
            )),
            (_pv_warpgroup, (
                latent_stages, rope_stages, full, empty, rescales, p_full, factors, factors_full,
                factors_empty, cu_seqlens, starts, partial_acc, out, accumulators, items, blocks,
                parallel, num_partials, QUERY_LEN, 1, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
                SPAN, COMBINES, FINISHES,
            )),
            (_load_tiles, (
                q_map, q_rope_map, latent_map, rope_map, q_tiles, q_rope, q_full, q_empty,
                latent_stages, rope_stages, full, empty, page_table, cu_seqlens, starts,
                table_stride, items, blocks, parallel, H, COLUMN_PARTS, KV_SPLIT, NEAR_SPLIT, FAR,
                SPAN, COMBINES,
            )),
        ],
        [4, 4, 1],
        # Registers per thread: P V warpgroups, twice, and the producer warp.
        [184, 184, 24],
    )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    if traits.get("latent", LATENT.value) != LATENT.value:
        return f"the latent is not {LATENT.value} wide"
    if traits.get("rope", ROPE.value) != ROPE.value:
        return f"rope is not {ROPE.value} wide"
    if traits.get("dtype", torch.float32) not in (torch.bfloat16, torch.float16):
        return "p is multiplied in bf16 or fp16"
    reason = supports(**traits)
    if reason is None and resolve_architecture(**traits) != HOPPER:
        return "wgmma exists on Hopper only"
    return reason


def column_parts_of(items: int, num_sms: int) -> int:
    """Return the CTAs that share an item's columns: two where half of the GPU would be idle."""
    return 2 if items * 2 <= num_sms else 1


@latent_attention.backend("hopper", supports=_supports)
def latent_attention_hopper(
    q_latent: Tensor,
    q_rope: Tensor,
    latents: KVCache,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    partition: Partition | None = None,
) -> Tensor:
    """Run latent_attention. What does not fit goes through triton.py. Quantized latents are
    dequantized ahead.

    partition: None for that of choose_partition.
    """
    contiguous = (
        isinstance(latents, QuantizedKV) or latents.is_contiguous() and ropes.is_contiguous()
    )
    if not (len(q_latent) and contiguous and latents.shape[1] == 64):
        return latent_attention_triton(
            q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, query_len,
            scale, partition,
        )  # fmt: skip
    out = torch.empty_like(q_latent)
    for group in dequantized_groups(latents, ropes, page_table, cu_seqlens, starts):
        _launch(out, q_latent, q_rope, *group, query_len, scale, partition)
    return out


def _launch(
    out: Tensor,
    q_latent: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    partition: Partition | None,
) -> None:
    """Fill the rows of `out` that these arguments describe."""
    rows = starts.shape[0]
    heads = q_latent.shape[1]
    tile = choose_tile(q_latent.dtype, HOPPER)
    num_keys = page_table.shape[1] * latents.shape[1]
    chosen = partition or choose_partition(rows, query_len, heads, LATENT.value, num_keys, tile)
    num_partials = ceil_div(num_keys, chosen.unit) if chosen.unit else 0
    count = rows * query_len * heads * num_partials
    blocks = tile.blocks(query_len, heads)
    items = rows * blocks * chosen.parallel
    num_sms = multiprocessor_count(q_latent.device)
    column_parts = column_parts_of(items, num_sms)
    items *= column_parts
    # Persistent: one CTA per multiprocessor; shared memory has no room for two.
    ctas = min(items, num_sms)
    device = q_latent.device
    partials = [
        torch.empty(count * width, dtype=torch.float32, device=device)
        for width in (1, 1, LATENT.value)
    ]
    accumulators = torch.empty(ctas * 2 * 64 * LATENT.value, dtype=torch.float32, device=device)
    _latent_kernel[(ctas,)](
        tile_descriptor(q_latent.view(-1, LATENT.value), HALF.value),
        tile_descriptor(q_rope.view(-1, ROPE.value), ROPE.value),
        tile_descriptor(latents.view(-1, LATENT.value), HALF.value),
        tile_descriptor(ropes.view(-1, ROPE.value), ROPE.value), page_table, cu_seqlens,
        starts, out, *partials, accumulators, scale * LOG2E, page_table.stride(0), items, blocks,
        chosen.parallel, num_partials, query_len, heads, column_parts, *tile.split_constants,
        chosen.unit != tile.near_split, not chosen.unit, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if num_partials:
        combine_partials(
            partials, cu_seqlens, starts, out, num_partials, query_len, chosen.unit, tile
        )
