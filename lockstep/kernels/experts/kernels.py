# mypy: ignore-errors
"""Kernels of experts: up, down, the fused down-and-combine of few tokens, and combine.

A pair is one (token, slot) with its expert. Weights are the left operand everywhere, so that wgmma
serves any number of tokens. A weight is a matrix of rows, row n of expert e at e * N + n, and is
read by formats/weights/dequantize_tile.py, quantized or not.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import relu2, sigmoid, silu_product
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.tree_reduction import load_tree_sum
from lockstep.kernels.experts.dispatch import clamped_experts
from lockstep.kernels.formats.weights.dequantize_tile import accumulate_partition
from lockstep.kernels.linear.dense_gemm import accumulate_dense


@triton.jit
def _tile_pairs(
    ids_ptr, order_ptr, table_ptr, tile, pairs, experts,
    SORTED: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return (expert of a tile, -1 for none; its pairs [BLOCK_M]; mask of valid pairs).

    SORTED: from the dispatch tables. Otherwise there is one tile per pair: of the pairs of one
    expert, every BLOCK_M-th pair's tile covers it and the next BLOCK_M - 1; other tiles are empty.
    Each tile of one token (fewer than 2 SLOTS lanes) has one pair, since its experts differ, and
    the first load of weights waits for no search. Equal ids, as a null row may have, are computed
    once each.
    """
    lane = tl.arange(0, BLOCK_M)
    if SORTED:
        expert = tl.load(table_ptr + tile * FIELDS)
        valid = lane < tl.load(table_ptr + tile * FIELDS + 1)
        pair_ids = tl.load(order_ptr + tile * BLOCK_M + lane)
        return expert, tl.where(valid, pair_ids, 0), valid
    elif LANES < 2 * SLOTS:
        expert = tl.minimum(tl.maximum(tl.load(ids_ptr + tile), 0), experts - 1)
        return expert, tl.where(lane == 0, tile, 0), lane == 0
    else:
        pair = tl.arange(0, LANES)
        pair_experts = clamped_experts(ids_ptr, pair, pair < pairs, experts)
        expert = tl.max(tl.where(pair == tile, pair_experts, -1), 0)
        same = (pair_experts == expert).to(tl.int32)
        before = tl.sum(tl.where(pair < tile, same, 0), 0)
        rank = tl.cumsum(same, 0) - 1 - before
        # One-hot [BLOCK_M, LANES]: which pair has which position in the tile.
        selected = (same[None, :] > 0) & (rank[None, :] == lane[:, None])
        pair_ids = tl.sum(tl.where(selected, pair[None, :], 0), 1)
        valid = before + lane < tl.sum(same, 0)
        return tl.where(before % BLOCK_M == 0, expert, -1), pair_ids, valid


@triton.jit(do_not_specialize=["pairs"])
def up_kernel(
    x_ptr, weight, act_ptr, ids_ptr, order_ptr, table_ptr, pairs, x_stride, experts, K, inner,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr, SORTED: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the activations of a tile: silu(gate) * up, or max(up, 0)^2 where not GATED.

    act: [pairs, inner]; [tiles * BLOCK_M, inner], in the order of tiles, where SORTED.

    GATED interleaves 8 rows of gate with the 8 rows of up that belong to them, so that wgmma leaves
    both factors of a product in one thread, which owns rows r and r + 8. Rows past the end repeat
    the last one: computed, not stored.
    """
    pdl_start()
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    blocks = tl.cdiv(inner, WIDTH)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * WIDTH
    expert, pair_ids, valid = _tile_pairs(
        ids_ptr, order_ptr, table_ptr, tile, pairs, experts, SORTED, SLOTS, LANES, FIELDS, BLOCK_M
    )
    if expert < 0:
        return
    row = tl.arange(0, BLOCK_N)
    if GATED:
        column = first + row // 16 * 8 + row % 8
        within = row % 16 // 8 * inner + tl.minimum(column, inner - 1)
        rows = expert.to(tl.int64) * 2 * inner + within
    else:
        rows = expert.to(tl.int64) * inner + tl.minimum(first + row, inner - 1)
    x_offsets = (pair_ids // SLOTS).to(tl.int64) * x_stride
    x_ptrs = x_ptr + x_offsets[:, None] + tl.arange(0, BLOCK_K)[None, :]
    acc = accumulate_partition(
        weight, rows, x_ptrs, valid[:, None], 0, K, FORMAT, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
        act_ptr.dtype.element_ty,
    )  # fmt: skip
    dtype = act_ptr.dtype.element_ty
    # Epilogue: the products are rounded before the activation, as the op defines.
    if GATED:
        halves = tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M))
        gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        activated = silu_product(gate.to(dtype), up.to(dtype), dtype)
    else:
        activated = relu2(acc.to(dtype).to(tl.float32)).to(dtype)
    column = first + tl.arange(0, WIDTH)
    if SORTED:
        pair_ids = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    ptrs = act_ptr + pair_ids.to(tl.int64)[None, :] * inner + column[:, None]
    mask = valid[None, :] & (column < inner)[:, None]
    tl.store(ptrs, tl.reshape(activated, (WIDTH, BLOCK_M)), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def down_kernel(
    act, weight, y_ptr, order_ptr, table_ptr, pairs, experts, K, hidden,
    FIELDS: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [pairs, hidden]: the down projections of one expert's pairs.

    act: in the order of tiles; rows after a tile's last pair are multiplied and not stored. TMA:
    act and weight are descriptors.
    """
    pdl_start()
    blocks = tl.cdiv(hidden, BLOCK_N)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    expert, pair_ids, valid = _tile_pairs(
        None, order_ptr, table_ptr, tile, pairs, experts, True, 1, 1, FIELDS, BLOCK_M
    )
    if expert < 0:
        return
    if TMA:
        (acc,) = accumulate_dense(
            0, K, act, weight, None, tile * BLOCK_M, expert * hidden + first,
            True, True, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        rows = expert.to(tl.int64) * hidden + tl.minimum(column, hidden - 1)
        act_rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        act_ptrs = act + act_rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        acc = accumulate_partition(
            weight, rows, act_ptrs, valid[:, None], 0, K, FORMAT, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
            act.dtype.element_ty,
        ).T  # fmt: skip
    ptrs = y_ptr + pair_ids.to(tl.int64)[:, None] * hidden + column[None, :]
    mask = valid[:, None] & (column < hidden)[None, :]
    tl.store(ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_shared_expert(
    shared_ptr, gate_ptr, token, column, mask, shared_stride, partial_stride, gate_stride,
    PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load what the shared expert adds to columns of a token's sum, in fp32.

    Its output is the tree sum of PARTS partials, partial_stride elements apart, rounded to DTYPE.
    """
    offsets = token * shared_stride + column
    output = load_tree_sum(shared_ptr, offsets, partial_stride.to(tl.int64), mask, PARTS)
    output = output.to(DTYPE).to(tl.float32)
    if gate_ptr is not None:
        logit = tl.load(gate_ptr + token * gate_stride + tl.zeros_like(column)).to(tl.float32)
        output = (sigmoid(logit).to(DTYPE).to(tl.float32) * output).to(DTYPE).to(tl.float32)
    return output


@triton.jit(do_not_specialize=["partial_stride"])
def combine_kernel(
    y_ptr, weights_ptr, out_ptr, shared_ptr, gate_ptr, hidden, shared_stride, partial_stride,
    gate_stride, SLOTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of out [T, hidden] of one token, slots in ascending order."""
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        y = tl.load(y_ptr + pair * hidden + column, mask=mask, other=0.0)
        total += tl.load(weights_ptr + pair).to(tl.float32) * y.to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if shared_ptr is not None:
        total += _load_shared_expert(
            shared_ptr, gate_ptr, token, column, mask, shared_stride, partial_stride, gate_stride,
            PARTS, dtype,
        )  # fmt: skip
    tl.store(out_ptr + token * hidden + column, total.to(dtype), mask=mask)


@triton.jit
def _add_in_order(total, parts):
    """Add each of parts [P, C], P a power of two, to total [C] in ascending order."""
    COUNT: tl.constexpr = parts.shape[0]
    if COUNT == 1:
        return total + tl.reshape(parts, (parts.shape[1],))
    else:
        halves = tl.reshape(parts, (2, COUNT // 2, parts.shape[1]))
        low, high = tl.split(tl.permute(halves, (1, 2, 0)))
        return _add_in_order(_add_in_order(total, low), high)


@triton.jit(do_not_specialize=["partial_stride"])
def down_combine_kernel(
    act_ptr, weight, ids_ptr, weights_ptr, out_ptr, shared_ptr, gate_ptr, experts, K, hidden,
    shared_stride, partial_stride, gate_stride,
    SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, PARTS: tl.constexpr,
    FORMAT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N // PADDED_SLOTS columns of one token: down projections and combine, fused.

    The weight tile is these columns of every slot's expert, the act tile the token's slots, so one
    wgmma serves all slots. Of its result only the diagonal blocks, expert and slot equal, are kept.
    PADDED_SLOTS is SLOTS rounded up to a power of two: padding repeats the last slot's expert and
    counts for none. What the sum needs is loaded before the weights, so that nothing is waited for
    after them.
    """
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = BLOCK_N // PADDED_SLOTS
    first = tl.program_id(1) * WIDTH
    padded_slot = tl.arange(0, PADDED_SLOTS)
    slot_weights = tl.load(
        weights_ptr + token * SLOTS + padded_slot, mask=padded_slot < SLOTS, other=0.0
    )
    column = first + tl.arange(0, WIDTH)
    inside = column < hidden
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if shared_ptr is not None:
        shared_output = _load_shared_expert(
            shared_ptr, gate_ptr, token, column, inside, shared_stride, partial_stride,
            gate_stride, PARTS, dtype,
        )  # fmt: skip
    row = tl.arange(0, BLOCK_N)
    row_slot = tl.minimum(row // WIDTH, SLOTS - 1)
    expert = clamped_experts(ids_ptr + token * SLOTS, row_slot, row_slot < SLOTS, experts)
    rows = expert.to(tl.int64) * hidden + tl.minimum(first + row % WIDTH, hidden - 1)
    slot = tl.arange(0, BLOCK_M)
    valid = slot < SLOTS
    act_ptrs = act_ptr + (token * SLOTS + slot)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    acc = accumulate_partition(
        weight, rows, act_ptrs, valid[:, None], 0, K, FORMAT, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
        act_ptr.dtype.element_ty,
    )  # fmt: skip
    # The diagonal blocks: each row keeps the column of its slot. Adding zeros is exact.
    diagonal = ((row // WIDTH)[:, None] == slot[None, :]) & valid[None, :]
    y = tl.sum(tl.where(diagonal, acc, 0.0), 1).to(act_ptr.dtype.element_ty).to(tl.float32)
    parts = tl.reshape(y, (PADDED_SLOTS, WIDTH)) * slot_weights.to(tl.float32)[:, None]
    total = _add_in_order(tl.zeros((WIDTH,), tl.float32), parts)
    if shared_ptr is not None:
        total += shared_output
    tl.store(out_ptr + token * hidden + column, total.to(dtype), mask=inside)
