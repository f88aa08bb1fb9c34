# mypy: ignore-errors
"""The kernel of quantized_pipeline.py for programs that share tiles evenly.

Where tiles are not many times as many as multiprocessors, some of these have one more than others.
So each program has as many slots of tiles, one after the other: it may begin and end within a tile.
What begins a tile comes first, and its sums are left for the next program, which goes on from them
last, so that it hardly waits; the order of columns within a sum stays. A program waits for one of a
lower number alone, which a GPU starts first.

A CTA marks the partial sums that it leaves with the epoch of the launch (lockstep.kernels.epochs).
Sums and marks of a launch that broke off have another epoch, so no later launch takes them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lockstep.kernels.device.dequantize import FP4
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.linear.quantized_pipeline import (
    BLOCK,
    HALF,
    LOADING,
    beside,
    bring,
    fetch,
    multiply_slot,
    next_slot,
    parts_of,
    sums_layout,
    words_layout,
)

MIX = gl.constexpr(-7046029254386353131)
"""Odd factor of the epochs (2^64 over the golden ratio). Distinct epochs stay distinct, and none of
them is a small number, such as other kernels leave in the same memory."""


@gluon.jit
def _epoch(generation, serial):
    """Return the epoch of this launch: int64, never 0, the same in all CTAs."""
    return (gl.load(generation) + (serial.to(gl.int64) << 32)) * MIX


@gluon.jit
def _share(each, more, slots):
    """What a program has of the tiles of its tokens and segment, of so many slots each: (its first
    slot, its last and one, its last tile, its tiles, whole or in part)."""
    program = gl.program_id(0)
    begin = program * each + gl.minimum(program, more)
    end = begin + each + (program < more).to(gl.int32)
    tile = (end - 1) // slots
    return begin, end, tile, tile - begin // slots + 1


@gluon.jit
def _piece(tile, begin, end, slots):
    """The first slot of a tile that a program has, and its last and one."""
    return gl.maximum(begin - tile * slots, 0), gl.minimum(end - tile * slots, slots)


@gluon.jit
def _load(
    x_map, w_map, x_ring, w_ring, full, empty, m, each, more, slots, COUNT: gl.constexpr
):  # fmt: skip
    """The warp that has blocks brought, COUNT into each slot once that is free."""
    SLOTS: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_ring.shape[1]
    begin, end, top, tiles = _share(each, more, slots)
    slot = 0
    phase = 1
    for i in range(tiles):
        low, high = _piece(top - i, begin, end, slots)
        n = (top - i) * ROWS
        for j in range(low, high):
            first = gl.program_id(2) * slots + j
            bring(x_map, w_map, x_ring, w_ring, full, empty, slot, phase, n, m, first, COUNT, COUNT)
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _in_line(sums):
    """Sums [ROWS, TOKENS] in the order of memory that keeps what a warp has of 8 rows and 8 tokens
    together: it loads and stores whole lines."""
    ROWS: gl.constexpr = sums.shape[0]
    TOKENS: gl.constexpr = sums.shape[1]
    blocks = sums.reshape([ROWS // 8, 8, TOKENS // 8, 8]).permute((0, 2, 1, 3))
    return blocks.reshape([ROWS * TOKENS])


@gluon.jit
def _from_line(line, ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Sums [ROWS, TOKENS] again."""
    blocks = line.reshape([ROWS // 8, TOKENS // 8, 8, 8]).permute((0, 2, 1, 3))
    return gl.convert_layout(blocks.reshape([ROWS, TOKENS]), layout, assert_trivial=True)


@gluon.jit
def _places(program, none, like):
    """Where a program's sums lie, as _in_line has them. none: a 0 that is not known when compiled,
    so that these are not held in registers around a loop."""
    COUNT: gl.constexpr = like.shape[0]
    return (program + none) * COUNT + gl.arange(0, COUNT, like.type.layout)


@gluon.jit
def _begun(
    sums, flags, epoch, program, low, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the sums of a tile's slots before `low`, once the CTA before this one left them."""
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout)
    if low > 0:
        # Reset what was waited for: a graph without `advance` repeats the epoch when replayed.
        none = epoch * 0
        while gl.atomic_cas(flags + program - 1, epoch, none, sem="acquire") != epoch:
            pass
        places = _places(program - 1, low >> 30, _in_line(acc))
        line = gl.load(sums + places, cache_modifier=".cg")
        acc = _from_line(line, ROWS, TOKENS, layout)
    return acc


@gluon.jit
def _leave(
    total, out, sums, flags, epoch, program, high, slots, tokens, N, n, m, out_stride,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the sums of a tile: its results, or what the next program goes on from."""
    ROWS: gl.constexpr = total.shape[0]
    TOKENS: gl.constexpr = total.shape[1]
    if high == slots:
        own = n + (high >> 30) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        token = m + (high >> 30) + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
        mask = (own < N) & (token < tokens)
        place = gl.program_id(2).to(gl.int64) * tokens * N + token.to(gl.int64) * out_stride
        gl.store(out + (place + own), total.to(out.dtype.element_ty), mask=mask)
    else:
        line = _in_line(total)
        gl.store(sums + _places(program, high >> 30, line), line)
        barrier()
        gl.atomic_xchg(flags + program, epoch, sem="release")


@gluon.jit
def _pass(
    acc, found, scales, zeros, factor, x_ring, w_ring, full, empty, slot, phase, block, low, high,
    FORM: gl.constexpr, COUNT: gl.constexpr, SYNC: gl.constexpr, DTYPE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Slots low .. high - 1 of a tile: (its sums, the next slot of the ring, its phase)."""
    SLOTS: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    whole: gl.constexpr = words_layout(BLOCK, FORM[1], WARPS, ROWS)
    half: gl.constexpr = words_layout(HALF, FORM[1], WARPS, ROWS)
    before = 0
    for j in range(low, high - 1):
        acc, found = multiply_slot(
            acc, found, scales, zeros, factor, x_ring, w_ring, full, slot, phase, block,
            FORM, COUNT, DTYPE, whole, half, left, False,
        )  # fmt: skip
        fence_async_shared()  # loads of this slot are over
        barrier()
        if SYNC:
            mbarrier.arrive(empty.index(slot))  # all warps have left it
        else:
            mbarrier.arrive(empty.index(before), pred=j > low)  # what multiplies is left: this
        before = slot
        slot, phase = next_slot(slot, phase, SLOTS)
        block += COUNT
    # Behind the loop's end, what waits there does not keep ptxas from reading sums too early.
    total, found = multiply_slot(
        acc, found, scales, zeros, factor, x_ring, w_ring, full, slot, phase, block,
        FORM, COUNT, DTYPE, whole, half, left, True,
    )  # fmt: skip
    fence_async_shared()
    barrier()
    if not SYNC:
        mbarrier.arrive(empty.index(before), pred=high > low + 1)
    mbarrier.arrive(empty.index(slot))
    slot, phase = next_slot(slot, phase, SLOTS)
    return total, slot, phase


@gluon.jit
def _multiply(
    scales, zeros, factors, out, sums, flags, generation, serial, x_ring, w_ring, full, empty,
    tokens, N, first, m, each, more, slots, scale_stride, out_stride, FORM: gl.constexpr,
    COUNT: gl.constexpr, SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that unpack and multiply: of a program's tiles the last one first, which another
    program goes on with; then the first one, which another one began, does not wait for long."""
    ROWS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = sums_layout(WARPS, TOKENS, SYNC)
    half: gl.constexpr = words_layout(HALF, FORM[1], WARPS, ROWS)
    program = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    program = program * gl.num_programs(0) + gl.program_id(0)
    begin, end, top, tiles = _share(each, more, slots)
    epoch = _epoch(generation, serial)  # here, not before the partitions: copies need not wait
    slot = 0
    phase = 0
    for i in range(tiles):
        low, high = _piece(top - i, begin, end, slots)
        n = (top - i) * ROWS
        rows = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, half)), N - 1).to(gl.int64)
        numbers = beside(rows, first, scale_stride, FORM)
        own_scales = scales + numbers
        own_zeros = zeros
        if zeros is not None:
            own_zeros = zeros + numbers
        factor = None
        if FORM[0] == FP4:
            factor = parts_of(gl.load(factors + rows), FORM)
        block = (gl.program_id(2) * slots + low) * COUNT
        found = fetch(own_scales, own_zeros, block, True, FORM)
        acc = _begun(sums, flags, epoch, program, low, ROWS, TOKENS, layout)
        total, slot, phase = _pass(
            acc, found, own_scales, own_zeros, factor, x_ring, w_ring, full, empty, slot, phase,
            block, low, high, FORM, COUNT, SYNC, DTYPE, layout,
        )  # fmt: skip
        _leave(
            total, out, sums, flags, epoch, program, high, slots, tokens, N, n, m, out_stride,
            layout,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["serial", "tokens", "each", "more", "slots", "first", "scale_stride"])
def shared_ring_kernel(
    x_map, w_map, scales, zeros, factors, out, sums, flags, generation, serial, tokens, N, each,
    more, slots, first, scale_stride, out_stride, FORM: gl.constexpr, SLOTS: gl.constexpr,
    COUNT: gl.constexpr, SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A share of the tiles of some tokens and a segment, of out [parts, tokens, N], rows out_stride
    apart: `each` slots, or one more in the first `more` programs, of `slots` in a tile, of COUNT
    blocks each. sums [CTAs, ROWS, TOKENS] fp32: the partial sums that a CTA leaves of a tile's
    first slots. flags [CTAs] int64: the epoch once they are there. Both may hold anything before
    the launch. generation, serial: see lockstep.kernels.epochs. The others: see ring_kernel."""
    ROWS: gl.constexpr = w_map.block_type.shape[0]
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
    m = gl.program_id(1) * TOKENS
    gl.warp_specialize(
        [
            (_multiply, (
                scales, zeros, factors, out, sums, flags, generation, serial, x_ring, w_ring, full,
                empty, tokens, N, first, m, each, more, slots, scale_stride, out_stride, FORM,
                COUNT, SYNC, DTYPE,
            )),
            (_load, (x_map, w_map, x_ring, w_ring, full, empty, m, each, more, slots, COUNT)),
        ],
        [1],
        [LOADING],
    )  # fmt: skip
