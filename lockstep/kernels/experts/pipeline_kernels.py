# mypy: ignore-errors
"""The products of experts with packed weights on Hopper, few tokens, in Gluon.

As in lockstep.kernels.linear.quantized_pipeline, whose chain this is: one warp has the copy engine
bring blocks of 128 columns, the others unpack them in registers and multiply by mma.sync. Rows of
the weight come in boxes of 8, each from where it lies: 8 of gate and the 8 of up in turn, or
 8 of each expert that a token chose. In a product a lane holds rows r and r + 8. A block of x is
all tokens, or one token's slots.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.device.activations import silu_product
from lockstep.kernels.linear.quantized_pipeline import (
    BLOCK,
    HALF,
    chain,
    next_slot,
    rows_layout,
    sums_layout,
)
from lockstep.kernels.linear.triton import tree_load

BOX = gl.constexpr(8)
"""Rows of a weight that are brought at once."""
LOADING = gl.constexpr(40)
"""Registers of a thread that starts copies, of so many boxes."""


@gluon.jit
def _positive_squared(x):
    """max(x, 0)^2, NaN where x is."""
    positive = gl.where(x > 0, x, gl.where(x == x, 0.0, x))
    return positive * positive


@gluon.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)), divided as IEEE does."""
    return gl.div_rn(gl.full(x.shape, 1.0, gl.float32, x.type.layout), 1.0 + gl.exp(-x))


@gluon.jit
def _expert(ids, pair, experts):
    """The expert of a pair, whatever stands there."""
    return gl.minimum(gl.maximum(gl.load(ids + pair), 0), experts - 1)


@gluon.jit
def _load(
    x_map, w_map, x_ring, w_ring, full, empty, rows, m, blocks, COUNT: gl.constexpr
):  # fmt: skip
    """The warp that has blocks brought, COUNT into each slot once that is free. rows: the first of
    each box, a tuple; a slot may have more, of which nothing is used. m: the first row of x."""
    SLOTS: gl.constexpr = full.shape[0]
    WORDS: gl.constexpr = w_ring.shape[2]
    BOXES: gl.constexpr = w_ring.shape[1] // BOX
    SIZE: gl.constexpr = COUNT * (len(rows) * BOX * WORDS * 4 + x_ring.shape[1] * BLOCK * 2)
    boxes = w_ring._reinterpret(gl.int32, [SLOTS * COUNT * BOXES, BOX, WORDS], w_ring.layout)
    slot = 0
    phase = 1
    for i in range(0, blocks, COUNT):
        mbarrier.wait(empty.index(slot), phase)
        ready = full.index(slot)
        mbarrier.expect(ready, SIZE)
        for c in gl.static_range(COUNT):
            at = i + c
            place = slot * COUNT + c
            for box in gl.static_range(len(rows)):
                to = boxes.index(place * BOXES + box)
                tma.async_copy_global_to_shared(w_map, [rows[box], at * WORDS], ready, to)
            low = x_ring.index(2 * place)
            tma.async_copy_global_to_shared(x_map, [m, at * BLOCK], ready, low)
            high = x_ring.index(2 * place + 1)
            tma.async_copy_global_to_shared(x_map, [m, at * BLOCK + HALF], ready, high)
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _ring(
    x_map, w_map, ROWS: gl.constexpr, SLOTS: gl.constexpr, COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Shared memory: (x, words, full, empty)."""
    TOKENS: gl.constexpr = x_map.block_type.shape[0]
    WORDS: gl.constexpr = w_map.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(gl.int32, [SLOTS * COUNT, ROWS, WORDS], w_map.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [2 * SLOTS * COUNT, TOKENS, HALF], x_map.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return x_ring, w_ring, full, empty


@gluon.jit
def _paired(total):
    """Sums of rows 8 of gate and 8 of up in turn: [ROWS, TOKENS] -> two of [ROWS // 2, TOKENS]."""
    GROUPS: gl.constexpr = total.shape[0] // 16
    TOKENS: gl.constexpr = total.shape[1]
    halves = total.reshape([GROUPS, 2, 8, TOKENS]).permute((0, 2, 3, 1))
    gate, up = gl.split(halves)
    return gate.reshape([8 * GROUPS, TOKENS]), up.reshape([8 * GROUPS, TOKENS])


@gluon.jit
def _activated(total, GATED: gl.constexpr, DTYPE: gl.constexpr):
    """Sums of an expert's rows -> numbers of DTYPE: silu(gate) * up, or max(up, 0)^2."""
    if GATED:
        gate, up = _paired(total)
        return silu_product(gate.to(DTYPE), up.to(DTYPE), DTYPE)
    else:
        return _positive_squared(total.to(DTYPE).to(gl.float32)).to(DTYPE)


@gluon.jit
def _rows_of(expert, row, start, n, GATED: gl.constexpr):
    """Where rows of a block lie in the weight, each expert's n or 2 n together: int64. Those past
    the end are copies of the last one."""
    if GATED:
        column = gl.minimum(start + row // 16 * BOX + row % BOX, n - 1)
        return expert.to(gl.int64) * 2 * n + row % 16 // BOX * n + column
    else:
        return expert.to(gl.int64) * n + gl.minimum(start + row, n - 1)


@gluon.jit
def _boxes_of(expert, start, n, ROWS: gl.constexpr, GATED: gl.constexpr):
    """The first row of each box of a block. Those past the end bring what is not used."""
    boxes = ()
    for box in gl.static_range(ROWS // BOX):
        if GATED:
            boxes = boxes + (expert * 2 * n + box % 2 * n + start + box // 2 * BOX,)
        else:
            boxes = boxes + (expert * n + start + box * BOX,)
    return boxes


@gluon.constexpr_function
def width_of(rows, gated):
    """Outputs of a block of so many rows of up."""
    return rows // 2 if gated else rows


@gluon.jit
def _few(
    scales, zeros, factors, act, ids, x_ring, w_ring, full, empty, tokens, expert, experts, n,
    start, first, blocks, scale_stride, GATED: gl.constexpr, FORM: gl.constexpr,
    TOP_K: gl.constexpr, COUNT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply and store: of the tokens that chose this expert."""
    ROWS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    sums: gl.constexpr = sums_layout(gl.num_warps(), TOKENS, True)
    layout: gl.constexpr = _activated(
        gl.zeros((ROWS, TOKENS), gl.float32, sums), GATED, DTYPE
    ).type.layout
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    chosen = token * 0
    for k in gl.static_range(TOP_K):
        own = gl.load(ids + token * TOP_K + k, mask=token < tokens, other=0)
        same = gl.minimum(gl.maximum(own, 0), experts - 1) == expert
        chosen |= (same & (token < tokens)).to(gl.int32) << k
    row = gl.arange(0, ROWS, rows_layout(FORM[1], gl.num_warps(), ROWS))
    total = chain(
        _rows_of(expert, row, start, n, GATED), scales, zeros, factors, x_ring, w_ring, full, empty,
        first, 0, blocks, scale_stride, FORM, COUNT, True, DTYPE,
    )  # fmt: skip
    made = _activated(total, GATED, DTYPE)
    column = start + gl.arange(0, made.shape[0], gl.SliceLayout(1, layout))
    to = act + (token * TOP_K).to(gl.int64)[None, :] * n + column[:, None]
    for k in gl.static_range(TOP_K):
        mask = ((chosen >> k) & 1 > 0)[None, :] & (column < n)[:, None]
        gl.store(to + k * n, made, mask=mask)


@gluon.jit(do_not_specialize=["tokens", "pairs", "blocks", "first", "scale_stride"])
def few_kernel(
    x_map, w_map, scales, zeros, factors, act, ids, tokens, pairs, experts, n, blocks, first,
    scale_stride, GATED: gl.constexpr, FORM: gl.constexpr, TOP_K: gl.constexpr,
    LANES: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """act [tokens x TOP_K, n]: some columns of a pair's expert, activated, for all tokens that
    chose it. Of an expert's pairs the first one's programs do so.

    All tokens stand in a block: what it holds of those that chose others is not stored. blocks: of
    K, filled up; LANES: a power of two, pairs at least.
    """
    x_ring, w_ring, full, empty = _ring(x_map, w_map, ROWS, SLOTS, COUNT, DTYPE)
    parts = gl.cdiv(n, width_of(ROWS, GATED))
    pair = gl.program_id(0) // parts
    start = gl.program_id(0) % parts * width_of(ROWS, GATED)
    lane = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    expert = _expert(ids, pair, experts)
    others = gl.load(ids + lane, mask=lane < pair, other=0)
    others = gl.minimum(gl.maximum(others, 0), experts - 1)
    earlier = gl.sum(((others == expert) & (lane < pair)).to(gl.int32), 0)
    if earlier > 0:
        return
    boxes = _boxes_of(expert, start, n, ROWS, GATED)
    gl.warp_specialize(
        [
            (_few, (
                scales, zeros, factors, act, ids, x_ring, w_ring, full, empty, tokens, expert,
                experts, n, start, first, blocks, scale_stride, GATED, FORM, TOP_K, COUNT, DTYPE,
            )),
            (_load, (x_map, w_map, x_ring, w_ring, full, empty, boxes, 0, blocks, COUNT)),
        ],
        [1],
        [LOADING],
    )  # fmt: skip


@gluon.jit
def _shared_part(
    shared, gate, token, column, live, shared_stride, part, gate_stride, PARTS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """As in triton.py: what the shared expert adds to columns of a token's sum, in fp32."""
    at = token * shared_stride + column
    last = tree_load(shared, at, part.to(gl.int64), live, PARTS).to(DTYPE).to(gl.float32)
    if gate is not None:
        share = gl.load(gate + token * gate_stride + column * 0).to(gl.float32)
        last = (_sigmoid(share).to(DTYPE).to(gl.float32) * last).to(DTYPE).to(gl.float32)
    return last


@gluon.jit
def _down(
    scales, zeros, factors, ids, weights, out, shared, gate, x_ring, w_ring, full, empty, token,
    experts, hidden, start, first, blocks, scale_stride, shared_stride, part, gate_stride,
    FORM: gl.constexpr, TOP_K: gl.constexpr, PARTS: gl.constexpr, COUNT: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply, sum over the slots and store."""
    ROWS: gl.constexpr = w_ring.shape[1]
    PLACES: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    own_rows: gl.constexpr = rows_layout(FORM[1], WARPS, ROWS)
    sums: gl.constexpr = sums_layout(WARPS, PLACES, True)
    spread: gl.constexpr = gl.BlockedLayout([PLACES, 1], [1, 32], [1, WARPS], [1, 0])
    place = gl.arange(0, PLACES, gl.SliceLayout(1, spread))
    column = start + gl.arange(0, BOX, gl.SliceLayout(0, spread))
    inside = column < hidden
    share = gl.load(weights + token * TOP_K + place, mask=place < TOP_K, other=0.0)
    last = gl.zeros((BOX,), gl.float32, gl.SliceLayout(0, spread))
    if shared is not None:
        last = _shared_part(
            shared, gate, token, column, inside, shared_stride, part, gate_stride, PARTS, DTYPE
        )
    row = gl.arange(0, ROWS, own_rows)
    expert = _expert(ids, token * TOP_K + gl.minimum(row // BOX, TOP_K - 1), experts)
    rows = expert.to(gl.int64) * hidden + gl.minimum(start + row % BOX, hidden - 1)
    total = chain(
        rows, scales, zeros, factors, x_ring, w_ring, full, empty, first, 0, blocks, scale_stride,
        FORM, COUNT, True, DTYPE,
    )  # fmt: skip
    slot = gl.arange(0, PLACES, gl.SliceLayout(0, sums))
    of_row = gl.arange(0, ROWS, gl.SliceLayout(1, sums)) // BOX
    own = (of_row[:, None] == slot[None, :]) & (slot < TOP_K)[None, :]
    y = gl.sum(gl.where(own, total, 0.0), 1).to(DTYPE).to(gl.float32)
    parts = gl.convert_layout(y.reshape([PLACES, BOX]), spread) * share.to(gl.float32)[:, None]
    summed = gl.zeros((BOX,), gl.float32, gl.SliceLayout(0, spread))
    for k in gl.static_range(TOP_K):
        summed += gl.sum(gl.where((place == k)[:, None], parts, 0.0), 0)  # one number, and zeros
    if shared is not None:
        summed += last
    gl.store(out + token * hidden + column, summed.to(DTYPE), mask=inside)


@gluon.jit(do_not_specialize=["blocks", "first", "scale_stride", "part"])
def down_kernel(
    x_map, w_map, scales, zeros, factors, ids, weights, out, shared, gate, experts, hidden, blocks,
    first, scale_stride, shared_stride, part, gate_stride, FORM: gl.constexpr,
    TOP_K: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    COUNT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """BOX columns of out [T, hidden] of one token: of all that its experts give, and the sum.

    A block of the weight holds these columns of each slot's expert, that of x the act of the
    token's slots, one behind the other; of their products an expert's rows count for its own slot.
    """
    x_ring, w_ring, full, empty = _ring(x_map, w_map, ROWS, SLOTS, COUNT, DTYPE)
    token = gl.program_id(0)
    start = gl.program_id(1) * BOX
    boxes = ()
    for slot in gl.static_range(TOP_K):
        boxes = boxes + (_expert(ids, token * TOP_K + slot, experts) * hidden + start,)
    gl.warp_specialize(
        [
            (_down, (
                scales, zeros, factors, ids, weights, out, shared, gate, x_ring, w_ring, full,
                empty, token.to(gl.int64), experts, hidden, start, first, blocks, scale_stride,
                shared_stride, part, gate_stride, FORM, TOP_K, PARTS, COUNT, DTYPE,
            )),
            (_load, (
                x_map, w_map, x_ring, w_ring, full, empty, boxes, token * TOP_K, blocks, COUNT,
            )),
        ],
        [1],
        [LOADING],
    )  # fmt: skip
