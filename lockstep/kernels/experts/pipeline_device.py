# mypy: ignore-errors
"""Kernels of experts for few tokens and quantized weights on Hopper, in Gluon.

As in linear/quantized_pipeline.py, whose main loop this is, a producer warp starts TMA copies of
blocks of 128 columns, and the consumer warps dequantize them in registers and multiply by mma.sync.
The rows of a weight tile are copied in boxes of 8: 8 rows of gate and the matching 8 rows of up, or
8 rows of each expert that a token chose. A lane of an mma.sync product has rows r and r + 8, so it
has both factors of gate * up. An x tile is all tokens, or the slots of one token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lockstep.kernels.device.activations import silu_product
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.pipeline import HALF, K_BLOCK, allocate_pipeline, next_stage
from lockstep.kernels.device.tree_reduction import load_tree_sum
from lockstep.kernels.linear.quantized_pipeline import (
    accumulate_pipeline,
    accumulator_layout,
    row_layout,
)

BOX = gl.constexpr(8)
"""Weight rows of one TMA copy."""
PRODUCER_REGISTERS = gl.constexpr(40)
"""Registers per thread of the producer partition, which keeps the rows of many boxes."""


@gluon.jit
def _positive_squared(x):
    """Return max(x, 0)^2, NaN where x is NaN."""
    positive = gl.where(x > 0, x, gl.where(x == x, 0.0, x))
    return positive * positive


@gluon.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)) with an IEEE division."""
    return gl.div_rn(gl.full(x.shape, 1.0, gl.float32, x.type.layout), 1.0 + gl.exp(-x))


@gluon.jit
def _load_expert(ids_ptr, pair, experts):
    """Load the expert of a pair, clamped into range."""
    return gl.minimum(gl.maximum(gl.load(ids_ptr + pair), 0), experts - 1)


@gluon.jit
def _produce(
    x_desc, w_desc, x_buffers, w_buffers, full, empty, rows, m, blocks, BLOCKS: gl.constexpr
):  # fmt: skip
    """Producer partition: copy `blocks` blocks into the pipeline, BLOCKS a stage.

    rows: first weight row of each box, a tuple. A stage may have room for more boxes: their
    contents are undefined and not used. m: first row of x.
    """
    STAGES: gl.constexpr = full.shape[0]
    WORDS: gl.constexpr = w_buffers.shape[2]
    BOXES: gl.constexpr = w_buffers.shape[1] // BOX
    BYTES: gl.constexpr = BLOCKS * (len(rows) * BOX * WORDS * 4 + x_buffers.shape[1] * K_BLOCK * 2)
    # The same memory, one buffer per box.
    boxes = w_buffers._reinterpret(
        gl.int32, [STAGES * BLOCKS * BOXES, BOX, WORDS], w_buffers.layout
    )
    stage = 0
    phase = 1
    for i in range(0, blocks, BLOCKS):
        mbarrier.wait(empty.index(stage), phase)
        ready = full.index(stage)
        mbarrier.expect(ready, BYTES)
        for c in gl.static_range(BLOCKS):
            block = i + c
            buffer = stage * BLOCKS + c
            for box in gl.static_range(len(rows)):
                box_buffer = boxes.index(buffer * BOXES + box)
                tma.async_copy_global_to_shared(
                    w_desc, [rows[box], block * WORDS], ready, box_buffer
                )
            low = x_buffers.index(2 * buffer)
            tma.async_copy_global_to_shared(x_desc, [m, block * K_BLOCK], ready, low)
            high = x_buffers.index(2 * buffer + 1)
            tma.async_copy_global_to_shared(x_desc, [m, block * K_BLOCK + HALF], ready, high)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _split_gate_up(acc):
    """Split accumulators of interleaved rows into gate and up: two of [ROWS // 2, TOKENS]."""
    GROUPS: gl.constexpr = acc.shape[0] // 16
    TOKENS: gl.constexpr = acc.shape[1]
    halves = acc.reshape([GROUPS, 2, 8, TOKENS]).permute((0, 2, 3, 1))
    gate, up = gl.split(halves)
    return gate.reshape([8 * GROUPS, TOKENS]), up.reshape([8 * GROUPS, TOKENS])


@gluon.jit
def _activate(acc, GATED: gl.constexpr, DTYPE: gl.constexpr):
    """Round the accumulators and return silu(gate) * up, or max(up, 0)^2, in DTYPE."""
    if GATED:
        gate, up = _split_gate_up(acc)
        return silu_product(gate.to(DTYPE), up.to(DTYPE), DTYPE)
    else:
        return _positive_squared(acc.to(DTYPE).to(gl.float32)).to(DTYPE)


@gluon.jit
def _weight_rows(expert, row, start, n, GATED: gl.constexpr):
    """Return the weight rows of a tile, int64. An expert has n rows, or 2 n where GATED.

    Rows past the end repeat the last one.
    """
    if GATED:
        column = gl.minimum(start + row // 16 * BOX + row % BOX, n - 1)
        return expert.to(gl.int64) * 2 * n + row % 16 // BOX * n + column
    else:
        return expert.to(gl.int64) * n + gl.minimum(start + row, n - 1)


@gluon.jit
def _box_rows(expert, start, n, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Return the first weight row of each box of a tile. Boxes past the end copy unused rows."""
    boxes = ()
    for box in gl.static_range(ROWS // BOX):
        if GATED:
            boxes = boxes + (expert * 2 * n + box % 2 * n + start + box // 2 * BOX,)
        else:
            boxes = boxes + (expert * n + start + box * BOX,)
    return boxes


@gluon.constexpr_function
def tile_width(rows, gated):
    """Return the outputs of a tile of this many rows of up."""
    return rows // 2 if gated else rows


@gluon.jit
def _consume_up(
    scales_ptr, zeros_ptr, factors_ptr, act_ptr, ids_ptr, x_buffers, w_buffers, full, empty,
    tokens, expert, experts, n, start, scale_row_offset, blocks, scale_stride,
    GATED: gl.constexpr, FORMAT: gl.constexpr, TOP_K: gl.constexpr, BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Consumer partition of up: multiply, activate, and store for the tokens of this expert."""
    ROWS: gl.constexpr = w_buffers.shape[1]
    TOKENS: gl.constexpr = x_buffers.shape[1]
    acc_layout: gl.constexpr = accumulator_layout(gl.num_warps(), TOKENS, True)
    layout: gl.constexpr = _activate(
        gl.zeros((ROWS, TOKENS), gl.float32, acc_layout), GATED, DTYPE
    ).type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    # Bit k of slot_bits[token]: slot k of the token chose this expert.
    slot_bits = token * 0
    for k in gl.static_range(TOP_K):
        slot_expert = gl.load(ids_ptr + token * TOP_K + k, mask=token < tokens, other=0)
        same = gl.minimum(gl.maximum(slot_expert, 0), experts - 1) == expert
        slot_bits |= (same & (token < tokens)).to(gl.int32) << k
    row = gl.arange(0, ROWS, row_layout(FORMAT.bits, gl.num_warps(), ROWS))
    acc = accumulate_pipeline(
        _weight_rows(expert, row, start, n, GATED), scales_ptr, zeros_ptr, factors_ptr, x_buffers,
        w_buffers, full, empty, scale_row_offset, 0, blocks, scale_stride, FORMAT, BLOCKS, True,
        DTYPE,
    )  # fmt: skip
    activated = _activate(acc, GATED, DTYPE)
    column = start + gl.arange(0, activated.shape[0], gl.SliceLayout(1, layout))
    ptrs = act_ptr + (token * TOP_K).to(gl.int64)[None, :] * n + column[:, None]
    for k in gl.static_range(TOP_K):
        mask = ((slot_bits >> k) & 1 > 0)[None, :] & (column < n)[:, None]
        gl.store(ptrs + k * n, activated, mask=mask)


@gluon.jit(do_not_specialize=["tokens", "pairs", "blocks", "scale_row_offset", "scale_stride"])
def up_pipeline_kernel(
    x_desc, w_desc, scales_ptr, zeros_ptr, factors_ptr, act_ptr, ids_ptr, tokens, pairs, experts,
    n, blocks, scale_row_offset, scale_stride, GATED: gl.constexpr, FORMAT: gl.constexpr,
    TOP_K: gl.constexpr, LANES: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    BLOCKS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Compute some columns of act [tokens x TOP_K, n] for all tokens that chose a pair's expert.

    Of several tokens' pairs of one expert only the first one's CTAs work. The experts of one token
    differ; equal ids, as a null row may have, are computed twice, with the same bits. All tokens
    are in the x tile; products of tokens that chose other experts are not stored. blocks: of K,
    rounded up. LANES: a power of two, at least `pairs`.
    """
    x_buffers, w_buffers, full, empty = allocate_pipeline(
        x_desc, w_desc, ROWS, STAGES, BLOCKS, DTYPE
    )
    pdl_start()
    tiles = gl.cdiv(n, tile_width(ROWS, GATED))
    pair = gl.program_id(0) // tiles
    start = gl.program_id(0) % tiles * tile_width(ROWS, GATED)
    expert = _load_expert(ids_ptr, pair, experts)
    if LANES >= 2 * TOP_K:
        lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        lane_experts = gl.load(ids_ptr + lane, mask=lane < pair, other=0)
        lane_experts = gl.minimum(gl.maximum(lane_experts, 0), experts - 1)
        earlier = gl.sum(((lane_experts == expert) & (lane < pair)).to(gl.int32), 0)
        if earlier > 0:
            return
    boxes = _box_rows(expert, start, n, ROWS, GATED)
    gl.warp_specialize(
        [
            (_consume_up, (
                scales_ptr, zeros_ptr, factors_ptr, act_ptr, ids_ptr, x_buffers, w_buffers, full,
                empty, tokens, expert, experts, n, start, scale_row_offset, blocks, scale_stride,
                GATED, FORMAT, TOP_K, BLOCKS, DTYPE,
            )),
            (_produce, (
                x_desc, w_desc, x_buffers, w_buffers, full, empty, boxes, 0, blocks, BLOCKS,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_shared_expert(
    shared_ptr, gate_ptr, token, column, mask, shared_stride, partial_stride, gate_stride,
    PARTS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Load what the shared expert adds to a token's sum, in fp32. See kernels.py."""
    offsets = token * shared_stride + column
    output = load_tree_sum(shared_ptr, offsets, partial_stride.to(gl.int64), mask, PARTS)
    output = output.to(DTYPE).to(gl.float32)
    if gate_ptr is not None:
        logit = gl.load(gate_ptr + token * gate_stride + column * 0).to(gl.float32)
        output = (_sigmoid(logit).to(DTYPE).to(gl.float32) * output).to(DTYPE).to(gl.float32)
    return output


@gluon.jit
def _consume_down(
    scales_ptr, zeros_ptr, factors_ptr, ids_ptr, weights_ptr, out_ptr, shared_ptr, gate_ptr,
    x_buffers, w_buffers, full, empty, token, experts, hidden, start, scale_row_offset, blocks,
    scale_stride, shared_stride, partial_stride, gate_stride,
    FORMAT: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Consumer partition of down: multiply, combine the slots in order, and store."""
    ROWS: gl.constexpr = w_buffers.shape[1]
    PADDED_SLOTS: gl.constexpr = x_buffers.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    scale_row_layout: gl.constexpr = row_layout(FORMAT.bits, WARPS, ROWS)
    acc_layout: gl.constexpr = accumulator_layout(WARPS, PADDED_SLOTS, True)
    # All slots of a column in one thread: the ordered sum needs no shuffle.
    slot_layout: gl.constexpr = gl.BlockedLayout([PADDED_SLOTS, 1], [1, 32], [1, WARPS], [1, 0])
    slot = gl.arange(0, PADDED_SLOTS, gl.SliceLayout(1, slot_layout))
    column = start + gl.arange(0, BOX, gl.SliceLayout(0, slot_layout))
    inside = column < hidden
    slot_weights = gl.load(weights_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=0.0)
    # Loaded before the weights, so that nothing is waited for after them.
    shared_output = gl.zeros((BOX,), gl.float32, gl.SliceLayout(0, slot_layout))
    if shared_ptr is not None:
        shared_output = _load_shared_expert(
            shared_ptr, gate_ptr, token, column, inside, shared_stride, partial_stride,
            gate_stride, PARTS, DTYPE,
        )  # fmt: skip
    row = gl.arange(0, ROWS, scale_row_layout)
    expert = _load_expert(ids_ptr, token * TOP_K + gl.minimum(row // BOX, TOP_K - 1), experts)
    rows = expert.to(gl.int64) * hidden + gl.minimum(start + row % BOX, hidden - 1)
    acc = accumulate_pipeline(
        rows, scales_ptr, zeros_ptr, factors_ptr, x_buffers, w_buffers, full, empty,
        scale_row_offset, 0, blocks, scale_stride, FORMAT, BLOCKS, True, DTYPE,
    )  # fmt: skip
    # The diagonal blocks: a row keeps the column of its slot. Adding zeros is exact.
    acc_slot = gl.arange(0, PADDED_SLOTS, gl.SliceLayout(0, acc_layout))
    row_slot = gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout)) // BOX
    diagonal = (row_slot[:, None] == acc_slot[None, :]) & (acc_slot < TOP_K)[None, :]
    y = gl.sum(gl.where(diagonal, acc, 0.0), 1).to(DTYPE).to(gl.float32)
    parts = gl.convert_layout(y.reshape([PADDED_SLOTS, BOX]), slot_layout)
    parts = parts * slot_weights.to(gl.float32)[:, None]
    total = gl.zeros((BOX,), gl.float32, gl.SliceLayout(0, slot_layout))
    for k in gl.static_range(TOP_K):
        total += gl.sum(gl.where((slot == k)[:, None], parts, 0.0), 0)  # one number and zeros
    if shared_ptr is not None:
        total += shared_output
    gl.store(out_ptr + token * hidden + column, total.to(DTYPE), mask=inside)


@gluon.jit(do_not_specialize=["blocks", "scale_row_offset", "scale_stride", "partial_stride"])
def down_pipeline_kernel(
    x_desc, w_desc, scales_ptr, zeros_ptr, factors_ptr, ids_ptr, weights_ptr, out_ptr, shared_ptr,
    gate_ptr, experts, hidden, blocks, scale_row_offset, scale_stride, shared_stride,
    partial_stride, gate_stride, FORMAT: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Compute BOX columns of out [T, hidden] of one token: down projections and combine, fused.

    A weight tile is these columns of each slot's expert, the x tile the activations of the token's
    slots. Of their product only the diagonal blocks, expert and slot equal, are kept.
    """
    x_buffers, w_buffers, full, empty = allocate_pipeline(
        x_desc, w_desc, ROWS, STAGES, BLOCKS, DTYPE
    )
    pdl_start()
    token = gl.program_id(0)
    start = gl.program_id(1) * BOX
    boxes = ()
    for slot in gl.static_range(TOP_K):
        boxes = boxes + (_load_expert(ids_ptr, token * TOP_K + slot, experts) * hidden + start,)
    gl.warp_specialize(
        [
            (_consume_down, (
                scales_ptr, zeros_ptr, factors_ptr, ids_ptr, weights_ptr, out_ptr, shared_ptr,
                gate_ptr, x_buffers, w_buffers, full, empty, token.to(gl.int64), experts, hidden,
                start, scale_row_offset, blocks, scale_stride, shared_stride, partial_stride,
                gate_stride, FORMAT, TOP_K, PARTS, BLOCKS, DTYPE,
            )),
            (_produce, (
                x_desc, w_desc, x_buffers, w_buffers, full, empty, boxes, token * TOP_K, blocks,
                BLOCKS,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
