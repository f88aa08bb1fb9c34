# mypy: ignore-errors
"""Stream-K GEMM with a quantized weight: the kernel of quantized_pipeline.py with even work ranges.

With one CTA per tile, a partial last wave leaves multiprocessors idle. Stream-K gives each CTA an
equal range of k-iterations instead (an iteration is one pipeline stage), taken from the
concatenation of all tiles: a range may begin and end within a tile.

A CTA walks its range from the last tile to the first. Its last tile, which it begins and the next
CTA finishes, comes first. The next CTA continues from its partial accumulators in the first tile of
its own range, which it processes last, so that it hardly waits. The order of columns within an
accumulator stays ascending: no fix-up addition, no change of bits. A CTA waits only for the one
with the next lower id, which the GPU starts earlier, so a wait cannot deadlock.

The flags of handed-over accumulators contain the epoch of the launch (lockstep.kernels.epochs).
Accumulators and flags of a launch that was aborted have another epoch, so no later launch reads
them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lockstep.kernels.device.dependent_launch import pdl_release
from lockstep.kernels.device.dequantize import FP4
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.device.pipeline import (
    HALF,
    K_BLOCK,
    allocate_pipeline,
    fill_stage,
    next_stage,
)
from lockstep.kernels.linear.quantized_pipeline import (
    PRODUCER_REGISTERS,
    accumulator_layout,
    load_scales,
    multiply_stage,
    prepare_factor,
    scale_offsets,
    words_layout,
)

EPOCH_FACTOR = gl.constexpr(-7046029254386353131)
"""Odd factor of the epochs (2^64 over the golden ratio). Distinct epochs stay distinct, and none of
them is a small number, such as other kernels leave in the same memory."""


@gluon.jit
def _launch_epoch(generation_ptr, serial):
    """Return the epoch of this launch: int64, never 0, the same in all CTAs."""
    return (gl.load(generation_ptr) + (serial.to(gl.int64) << 32)) * EPOCH_FACTOR


@gluon.jit
def _work_range(iterations, remainder, tile_iterations):
    """Return the work range of this CTA: (begin, end, last tile, number of tiles touched).

    begin and end count k-iterations; a tile has tile_iterations of them. The first `remainder` CTAs
    take iterations + 1, the others `iterations`.
    """
    cta = gl.program_id(0)
    begin = cta * iterations + gl.minimum(cta, remainder)
    end = begin + iterations + (cta < remainder).to(gl.int32)
    tile = (end - 1) // tile_iterations
    return begin, end, tile, tile - begin // tile_iterations + 1


@gluon.jit
def _tile_range(tile, begin, end, tile_iterations):
    """Return the k-iterations (low, high) of a tile that are within a work range."""
    low = gl.maximum(begin - tile * tile_iterations, 0)
    return low, gl.minimum(end - tile * tile_iterations, tile_iterations)


@gluon.jit
def _produce(
    x_desc, w_desc, x_buffers, w_buffers, full, empty, m, iterations, remainder, tile_iterations,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Producer partition: copy the blocks of the work range, in the consumers' order."""
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_buffers.shape[1]
    begin, end, last_tile, tiles = _work_range(iterations, remainder, tile_iterations)
    stage = 0
    phase = 1
    for i in range(tiles):
        low, high = _tile_range(last_tile - i, begin, end, tile_iterations)
        n = (last_tile - i) * ROWS
        for j in range(low, high):
            first = gl.program_id(2) * tile_iterations + j
            fill_stage(
                x_desc, w_desc, x_buffers, w_buffers, full, empty, stage, phase, n, m, first,
                BLOCKS, BLOCKS,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _flatten_accumulators(acc):
    """Flatten acc [ROWS, TOKENS] so that a warp's 8 x 8 fragments are contiguous in memory.

    It then loads and stores whole cache lines.
    """
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    blocks = acc.reshape([ROWS // 8, 8, TOKENS // 8, 8]).permute((0, 2, 1, 3))
    return blocks.reshape([ROWS * TOKENS])


@gluon.jit
def _restore_accumulators(flat, ROWS: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr):
    """Undo _flatten_accumulators: acc [ROWS, TOKENS] in `layout`."""
    blocks = flat.reshape([ROWS // 8, TOKENS // 8, 8, 8]).permute((0, 2, 1, 3))
    return gl.convert_layout(blocks.reshape([ROWS, TOKENS]), layout, assert_trivial=True)


@gluon.jit
def _partial_offsets(cta, runtime_zero, like):
    """Return the offsets of a CTA's partial accumulators, flattened as `like` is.

    runtime_zero: added so that the compiler does not hoist the addresses out of the tile loop,
    where they would occupy registers.
    """
    COUNT: gl.constexpr = like.shape[0]
    return (cta + runtime_zero) * COUNT + gl.arange(0, COUNT, like.type.layout)


@gluon.jit
def _initial_accumulators(
    partials_ptr, flags_ptr, epoch, cta, low, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return zeros, or the accumulators of iterations before `low` that the previous CTA stored."""
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout)
    if low > 0:
        # Reset the flag: a captured graph repeats the epoch when it is replayed without `advance`.
        runtime_zero = epoch * 0
        while gl.atomic_cas(flags_ptr + cta - 1, epoch, runtime_zero, sem="acquire") != epoch:
            pass
        offsets = _partial_offsets(cta - 1, low >> 30, _flatten_accumulators(acc))
        # .cg: another multiprocessor wrote them, and L1 is not coherent.
        flat = gl.load(partials_ptr + offsets, cache_modifier=".cg")
        acc = _restore_accumulators(flat, ROWS, TOKENS, layout)
    return acc


@gluon.jit
def _store_tile(
    acc, out_ptr, partials_ptr, flags_ptr, epoch, cta, high, tile_iterations, tokens, N, n, m,
    out_stride, layout: gl.constexpr,
):  # fmt: skip
    """Store the outputs of a finished tile, or hand the accumulators over to the next CTA."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if high == tile_iterations:
        # high >> 30 is a runtime zero, as in _partial_offsets.
        outputs = n + (high >> 30) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        token = m + (high >> 30) + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
        mask = (outputs < N) & (token < tokens)
        offsets = gl.program_id(2).to(gl.int64) * tokens * N + token.to(gl.int64) * out_stride
        gl.store(out_ptr + (offsets + outputs), acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        flat = _flatten_accumulators(acc)
        gl.store(partials_ptr + _partial_offsets(cta, high >> 30, flat), flat)
        barrier()  # all warps have stored before one thread releases the flag
        gl.atomic_xchg(flags_ptr + cta, epoch, sem="release")


@gluon.jit
def _accumulate_range(
    acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, empty, stage, phase,
    block, low, high,
    FORMAT: gl.constexpr, BLOCKS: gl.constexpr, MMA_SYNC: gl.constexpr, DTYPE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Accumulate k-iterations low .. high of a tile: (acc, next stage, its phase)."""
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_buffers.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    w_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    block_layout: gl.constexpr = words_layout(K_BLOCK, FORMAT.bits, WARPS, ROWS)
    half_layout: gl.constexpr = words_layout(HALF, FORMAT.bits, WARPS, ROWS)
    previous = 0
    for j in range(low, high - 1):
        acc, scales = multiply_stage(
            acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, stage, phase,
            block, FORMAT, BLOCKS, DTYPE, block_layout, half_layout, w_layout, False,
        )  # fmt: skip
        fence_async_shared()  # reads of this stage precede the copy engine's next write
        barrier()  # of all consumer warps, since one thread arrives for them
        if MMA_SYNC:
            mbarrier.arrive(empty.index(stage))
        else:
            # The last wgmma of this stage still reads it: release the stage before.
            mbarrier.arrive(empty.index(previous), pred=j > low)
        previous = stage
        stage, phase = next_stage(stage, phase, STAGES)
        block += BLOCKS
    # Peeled: with the final wait inside the loop ptxas reads accumulators too early.
    total, scales = multiply_stage(
        acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, stage, phase,
        block, FORMAT, BLOCKS, DTYPE, block_layout, half_layout, w_layout, True,
    )  # fmt: skip
    fence_async_shared()
    barrier()
    if not MMA_SYNC:
        mbarrier.arrive(empty.index(previous), pred=high > low + 1)
    mbarrier.arrive(empty.index(stage))
    stage, phase = next_stage(stage, phase, STAGES)
    return total, stage, phase


@gluon.jit
def _consume(
    scales_ptr, zeros_ptr, factors_ptr, out_ptr, partials_ptr, flags_ptr, generation_ptr, serial,
    x_buffers, w_buffers, full, empty, tokens, N, scale_row_offset, m, iterations, remainder,
    tile_iterations, scale_stride, out_stride, FORMAT: gl.constexpr, BLOCKS: gl.constexpr,
    MMA_SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Consumer partition: dequantize and multiply the tiles of the work range, the last one first.

    The last tile's accumulators are what another CTA may wait for; the first tile, which another
    CTA began, is ready by the time that this one reaches it.
    """
    ROWS: gl.constexpr = w_buffers.shape[1]
    TOKENS: gl.constexpr = x_buffers.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = accumulator_layout(WARPS, TOKENS, MMA_SYNC)
    half_layout: gl.constexpr = words_layout(HALF, FORMAT.bits, WARPS, ROWS)
    cta = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    cta = cta * gl.num_programs(0) + gl.program_id(0)
    begin, end, last_tile, tiles = _work_range(iterations, remainder, tile_iterations)
    # Loaded here, not before the partitions split: the copies need not wait for it.
    epoch = _launch_epoch(generation_ptr, serial)
    stage = 0
    phase = 0
    for i in range(tiles):
        low, high = _tile_range(last_tile - i, begin, end, tile_iterations)
        n = (last_tile - i) * ROWS
        rows = gl.minimum(n + gl.arange(0, ROWS, gl.SliceLayout(1, half_layout)), N - 1)
        rows = rows.to(gl.int64)
        offsets = scale_offsets(rows, scale_row_offset, scale_stride, FORMAT)
        tile_scales_ptr = scales_ptr + offsets
        tile_zeros_ptr = zeros_ptr
        if zeros_ptr is not None:
            tile_zeros_ptr = zeros_ptr + offsets
        factor = None
        if FORMAT.kind == FP4:
            factor = prepare_factor(gl.load(factors_ptr + rows), FORMAT)
        block = (gl.program_id(2) * tile_iterations + low) * BLOCKS
        scales = load_scales(tile_scales_ptr, tile_zeros_ptr, block, True, FORMAT)
        acc = _initial_accumulators(partials_ptr, flags_ptr, epoch, cta, low, ROWS, TOKENS, layout)
        total, stage, phase = _accumulate_range(
            acc, scales, tile_scales_ptr, tile_zeros_ptr, factor, x_buffers, w_buffers, full,
            empty, stage, phase, block, low, high, FORMAT, BLOCKS, MMA_SYNC, DTYPE, layout,
        )  # fmt: skip
        _store_tile(
            total, out_ptr, partials_ptr, flags_ptr, epoch, cta, high, tile_iterations, tokens, N,
            n, m, out_stride, layout,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "serial", "tokens", "iterations", "remainder", "tile_iterations", "scale_row_offset",
        "scale_stride",
    ]
)  # fmt: skip
def stream_k_kernel(
    x_desc, w_desc, scales_ptr, zeros_ptr, factors_ptr, out_ptr, partials_ptr, flags_ptr,
    generation_ptr, serial, tokens, N, iterations, remainder, tile_iterations, scale_row_offset,
    scale_stride, out_stride, FORMAT: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    MMA_SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Compute a work range of the tiles of some tokens and one split-K partition.

    out [parts, tokens, N], rows out_stride apart. The other arguments: see pipeline_kernel.

    Args:
        iterations, remainder, tile_iterations: see _work_range. An iteration is BLOCKS blocks.
        partials_ptr: [CTAs, ROWS, TOKENS] fp32, accumulators handed over to the next CTA.
        flags_ptr: [CTAs] int64, the epoch once they are stored. Both may hold anything at launch.
        generation_ptr, serial: see lockstep.kernels.epochs.
    """
    pdl_release()
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    x_buffers, w_buffers, full, empty = allocate_pipeline(
        x_desc, w_desc, ROWS, STAGES, BLOCKS, DTYPE
    )
    m = gl.program_id(1) * TOKENS
    gl.warp_specialize(
        [
            (_consume, (
                scales_ptr, zeros_ptr, factors_ptr, out_ptr, partials_ptr, flags_ptr,
                generation_ptr, serial, x_buffers, w_buffers, full, empty, tokens, N,
                scale_row_offset, m, iterations, remainder, tile_iterations, scale_stride,
                out_stride, FORMAT, BLOCKS, MMA_SYNC, DTYPE,
            )),
            (_produce, (
                x_desc, w_desc, x_buffers, w_buffers, full, empty, m, iterations, remainder,
                tile_iterations, BLOCKS,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
