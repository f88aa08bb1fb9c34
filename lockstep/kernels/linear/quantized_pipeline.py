# mypy: ignore-errors
"""Warp-specialized GEMM with a quantized weight on Hopper, in Gluon: a multistage TMA pipeline.

A CTA computes 16 or 32 outputs for each of its consumer warps, some tokens, and one split-K
partition. One producer warp starts TMA copies of blocks of 128 columns, words and x, into the
stages of a pipeline in shared memory (kernels/device/pipeline.py). The consumer warps dequantize 64
columns in registers, which are then in the layout of a product's left operand, and multiply them:
by mma.sync, or by wgmma, overlapped with the product of the previous 64 columns.

A consumer's reads of a stage complete asynchronously to the copy engine: a proxy fence must precede
the arrival at `empty`, or the next copy may overtake them.

Words are interleaved as in formats/weights/word_order.py: the codes of two neighbouring columns
become one register, and nothing is shuffled between lanes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.dequantize import (
    FMA_INT4,
    FP4,
    FP8,
    GENERIC,
    SPLIT_FACTOR_FP4,
    SPLIT_SCALE_INT4,
    duplicate_16bit,
)
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.device.pipeline import (
    HALF,
    K_BLOCK,
    allocate_pipeline,
    copy_weight_blocks,
    copy_x_blocks,
    fill_stage,
    next_stage,
)
from lockstep.kernels.linear.quantized_ptx import (
    DUPLICATE_BF16,
    DUPLICATE_FP16,
    E4M3_TO_BF16_BY_PARITY,
    E4M3_TO_FP16,
    FACTOR_MISMATCH,
    FMA_INT4_BF16,
    FMA_INT4_CONSTRAINTS,
    FMA_SCALES,
    FP4_BF16,
    FP4_CONSTRAINTS,
    FP4_FP16,
    FP8_BF16,
    FP8_CONSTRAINTS,
    FP8_FP16,
    GENERIC_INT4_BF16,
    GENERIC_INT4_CONSTRAINTS,
    GENERIC_INT4_FP16,
    INT4_BF16,
    INT4_CONSTRAINTS,
    INT4_FP16,
    INT8_BF16,
    INT8_CONSTRAINTS,
    INT8_FP16,
    SPLIT_FACTOR_CONSTRAINTS,
    SPLIT_FACTOR_FP4_BF16,
    SPLIT_SCALE,
    SPLIT_SCALE_BF16,
    SPLIT_SCALE_CONSTRAINTS,
)

PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of the producer partition: the hardware's minimum."""
EARLY_TOKENS = gl.constexpr(16)
"""Maximum tokens of a tile whose weights are copied early.

H200, 2026-11-30, without and with early copies and prefetches of dense weights: steps of one row
took 2.50 and 2.44 ms (Qwen3.6-35B-A3B FP8), 7.85 and 7.88 ms (27B int4). At 64 rows they took 18.19
ms with early copies (27B FP8), and 17.51 to 18.08 without them on two machines. So 16 is an
estimate: with more tokens the first product waits for more bytes.
"""


@gluon.constexpr_function
def words_layout(columns, bits, warps, rows):
    """Return the register layout of words [rows, W] that a product's left operand needs."""
    per_lane = columns * bits // 128
    registers = [[0, 1 << i] for i in range(per_lane.bit_length() - 1)] + [[8, 0]]
    lanes = [[0, per_lane], [0, 2 * per_lane], [1, 0], [2, 0], [4, 0]]
    warp_bases = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    row_bits = range(warps.bit_length() + 3, rows.bit_length() - 1)
    registers += [[1 << i, 0] for i in row_bits]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [rows, 4 * per_lane])


@gluon.constexpr_function
def row_layout(bits, warps, rows):
    """Return the layout of values per weight row that matches words_layout."""
    return gl.SliceLayout(1, words_layout(64, bits, warps, rows))


@gluon.constexpr_function
def accumulator_layout(warps, tokens, mma_sync):
    """Return the layout of accumulators [16 warps, tokens] of mma.sync, or of wgmma."""
    if mma_sync:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.constexpr_function
def repeat_dtype(dtype, count):
    """Return the result types of inline PTX with `count` results of one dtype."""
    return (dtype,) * count


@gluon.jit
def _split_halves(words, layout: gl.constexpr):
    """Split the words of a block into those of its first and of its last 64 columns."""
    ROWS: gl.constexpr = words.shape[0]
    PER_LANE: gl.constexpr = words.shape[1] // 8
    low, high = gl.split(words.reshape([ROWS, 4, 2, PER_LANE]).permute((0, 1, 3, 2)))
    # assert_trivial: a real conversion would go through shared memory.
    low = gl.convert_layout(low.reshape([ROWS, 4 * PER_LANE]), layout, assert_trivial=True)
    high = gl.convert_layout(high.reshape([ROWS, 4 * PER_LANE]), layout, assert_trivial=True)
    return low, high


@gluon.jit
def load_scales(scales_ptr, zeros_ptr, block, mask, FORMAT: gl.constexpr):
    """Load the scales and zero points of one block for each weight row: two tensors.

    NVFP4 has two words of four scales; a format without zero points returns its scale twice.
    """
    if FORMAT.kind == FP4:
        return (
            gl.load(scales_ptr + 2 * block, mask=mask, other=0),
            gl.load(scales_ptr + 2 * block + 1, mask=mask, other=0),
        )
    else:
        if FORMAT.group_size == 0:
            group = block * 0
        else:
            group = block // (FORMAT.group_size // K_BLOCK)
        scale = gl.load(scales_ptr + group, mask=mask, other=0.0)
        zero = scale
        if zeros_ptr is not None:
            zero = gl.load(zeros_ptr + group, mask=mask, other=0.0)
        return scale, zero


@gluon.jit
def _duplicate(number, DTYPE: gl.constexpr):
    """Round fp32 numbers to DTYPE and put each into both halves of a register."""
    PTX: gl.constexpr = DUPLICATE_BF16 if DTYPE == gl.bfloat16 else DUPLICATE_FP16
    return gl.inline_asm_elementwise(PTX, "=r,f", [number], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _try_low_part(factor, hi, lo, chosen, ULPS: gl.constexpr):
    """Return lo + ULPS units in the last place if FACTOR_MISMATCH accepts it, else `chosen`."""
    moved = lo + ULPS * 0x10001
    mismatch = gl.inline_asm_elementwise(
        FACTOR_MISMATCH, "=&r,f,r,r", [factor, hi, moved], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.where(mismatch == 0, moved, chosen)


@gluon.jit
def prepare_factor(factor, FORMAT: gl.constexpr):
    """Return NVFP4's factors as two PTX operands: bf16 hi and lo, or 2^6 * factor twice."""
    if FORMAT.decoder == SPLIT_FACTOR_FP4:
        factor = factor * 6.646139978924579e35  # 2^119
        hi = _duplicate(factor, gl.bfloat16)
        lo = _duplicate(factor - (hi & -65536).to(gl.float32, bitcast=True), gl.bfloat16)
        chosen = lo
        for i in gl.static_range(5):  # the last accepted one wins: -2, 2, -1, 1, 0 ulps
            chosen = _try_low_part(factor, hi, lo, chosen, (2 - i // 2) * (i % 2 * 2 - 1))
        return hi, chosen
    else:
        return factor * 64.0, factor * 64.0


@gluon.jit
def _prepare_scales(scales, factor, PART: gl.constexpr, FORMAT: gl.constexpr, ZEROS: gl.constexpr,
                    DTYPE: gl.constexpr):  # fmt: skip
    """Turn the result of load_scales into PTX operands of one half of a block: [ROWS, 1] each."""
    if FORMAT.kind == FP4:
        PTX: gl.constexpr = (
            E4M3_TO_BF16_BY_PARITY if FORMAT.decoder == SPLIT_FACTOR_FP4 else E4M3_TO_FP16
        )
        first, second = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r", [scales[PART]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        return first[:, None], second[:, None], factor[0][:, None], factor[1][:, None]
    elif FORMAT.kind == FP8:
        return (scales[0][:, None],)
    elif FORMAT.decoder == GENERIC:
        MIDDLE_CODE: gl.constexpr = (1 << FORMAT.bits) / 2.0
        zero = gl.full(scales[0].shape, MIDDLE_CODE, gl.float32, scales[0].type.layout)
        if ZEROS:
            zero = scales[1].to(gl.float32)
        return scales[0].to(gl.float32)[:, None], (8388608.0 + zero)[:, None]
    elif FORMAT.decoder == FMA_INT4:
        offset, large = gl.inline_asm_elementwise(
            FMA_SCALES, "=&r,=&r,h", [scales[0]],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        return offset[:, None], large[:, None]
    else:
        zero = gl.full(scales[0].shape, 8.0, gl.float32, scales[0].type.layout)
        if ZEROS:
            zero = scales[1].to(gl.float32)
        if FORMAT.decoder == SPLIT_SCALE_INT4:
            offset = _duplicate(zero * (-1 / 64), DTYPE)
            high, low = gl.inline_asm_elementwise(
                SPLIT_SCALE, "=&r,=&r,h", [scales[0]],
                dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            return high[:, None], offset[:, None], low[:, None]
        else:
            BASE: gl.constexpr = 128.0 if DTYPE == gl.bfloat16 else 1024.0
            return duplicate_16bit(scales[0])[:, None], _duplicate(-BASE - zero, DTYPE)[:, None]


@gluon.jit
def _dequantize_4bit(words, operands, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
                     layout: gl.constexpr):  # fmt: skip
    """Dequantize the words of 64 columns, two per lane and row: [ROWS, 64]."""
    if FORMAT.decoder == SPLIT_FACTOR_FP4:
        v = gl.inline_asm_elementwise(
            SPLIT_FACTOR_FP4_BF16, SPLIT_FACTOR_CONSTRAINTS,
            [words, operands[0], operands[1], operands[2], operands[3]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORMAT.kind == FP4:
        FP4_PTX: gl.constexpr = FP4_BF16 if DTYPE == gl.bfloat16 else FP4_FP16
        v = gl.inline_asm_elementwise(
            FP4_PTX, FP4_CONSTRAINTS, [words, operands[0], operands[1], operands[2]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORMAT.decoder == FMA_INT4:
        v = gl.inline_asm_elementwise(
            FMA_INT4_BF16, FMA_INT4_CONSTRAINTS, [words, operands[0], operands[1]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORMAT.decoder == SPLIT_SCALE_INT4:
        v = gl.inline_asm_elementwise(
            SPLIT_SCALE_BF16, SPLIT_SCALE_CONSTRAINTS,
            [words, operands[0], operands[1], operands[2]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORMAT.decoder == GENERIC:
        GENERIC_PTX: gl.constexpr = GENERIC_INT4_BF16 if DTYPE == gl.bfloat16 else GENERIC_INT4_FP16
        v = gl.inline_asm_elementwise(
            GENERIC_PTX, GENERIC_INT4_CONSTRAINTS, [words, operands[0], operands[1]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        INT4_PTX: gl.constexpr = INT4_BF16 if DTYPE == gl.bfloat16 else INT4_FP16
        v = gl.inline_asm_elementwise(
            INT4_PTX, INT4_CONSTRAINTS, [words, operands[0], operands[1]],
            dtype=repeat_dtype(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    # Dimensions q, j, word, half, e -> column 32 word + 16 half + 8 e + 2 q + j (word_order.py).
    low = gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6]))
    high = gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))
    parts = gl.join(low, high).reshape([words.shape[0], 4, 2, 2, 2, 2])
    tile = parts.permute((0, 3, 4, 5, 1, 2)).reshape([words.shape[0], HALF])
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _dequantize_8bit(words, operands, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
                     layout: gl.constexpr):  # fmt: skip
    """Dequantize the words of 64 columns, four per lane and row: [ROWS, 64]."""
    if FORMAT.kind == FP8:
        FP8_PTX: gl.constexpr = FP8_BF16 if DTYPE == gl.bfloat16 else FP8_FP16
        v = gl.inline_asm_elementwise(
            FP8_PTX, FP8_CONSTRAINTS, [words, operands[0]],
            dtype=repeat_dtype(DTYPE, 4), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        INT8_PTX: gl.constexpr = INT8_BF16 if DTYPE == gl.bfloat16 else INT8_FP16
        v = gl.inline_asm_elementwise(
            INT8_PTX, INT8_CONSTRAINTS, [words, operands[0], operands[1]],
            dtype=repeat_dtype(DTYPE, 4), is_pure=True, pack=2,
        )  # fmt: skip
    # Dimensions q, pair, j, word, e -> column 32 pair + 16 word + 8 e + 2 q + j (word_order.py).
    parts = gl.join(gl.join(v[0], v[2]), gl.join(v[1], v[3]))
    parts = parts.reshape([words.shape[0], 4, 2, 2, 2, 2])
    tile = parts.permute((0, 2, 4, 5, 1, 3)).reshape([words.shape[0], HALF])
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _multiply_half(
    acc, words, scales, factor, x_tile, PART: gl.constexpr, FORMAT: gl.constexpr,
    ZEROS: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """Dequantize half a block and add its product with x_tile to acc.

    A wgmma is started, and all but PENDING of those in flight are waited for.
    """
    operands = _prepare_scales(scales, factor, PART, FORMAT, ZEROS, DTYPE)
    if FORMAT.bits == 4:
        w_tile = _dequantize_4bit(words, operands, FORMAT, DTYPE, layout)
    else:
        w_tile = _dequantize_8bit(words, operands, FORMAT, DTYPE, layout)
    if layout.parent.version[0] == 2:
        x_layout: gl.constexpr = gl.DotOperandLayout(1, layout.parent, 2)
        return mma_v2(w_tile, x_tile.permute((1, 0)).load(x_layout), acc)
    else:
        acc = warpgroup_mma(w_tile, x_tile.permute((1, 0)), acc, is_async=True)
        return warpgroup_mma_wait(PENDING, deps=(acc,))


@gluon.jit
def multiply_stage(
    acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, stage, phase, block,
    FORMAT: gl.constexpr, BLOCKS: gl.constexpr, DTYPE: gl.constexpr,
    block_layout: gl.constexpr, half_layout: gl.constexpr, w_layout: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """Wait for a stage and add the products of its BLOCKS blocks, of which `block` is the first.

    scales: of the first block; those of each next block are loaded ahead, past this stage's end
    too. LAST: no block follows, and all products are complete on return; else one wgmma may run on.

    Returns: acc, scales of the block after this stage.
    """
    ZEROS: gl.constexpr = zeros_ptr is not None
    mbarrier.wait(full.index(stage), phase)
    for i in gl.static_range(BLOCKS):
        block_scales = scales
        if not LAST or i + 1 < BLOCKS:
            scales = load_scales(scales_ptr, zeros_ptr, block + i + 1, True, FORMAT)
        words = w_buffers.index(stage * BLOCKS + i).load(block_layout)
        low, high = _split_halves(words, half_layout)
        x_tile = x_buffers.index(2 * (stage * BLOCKS + i))
        acc = _multiply_half(
            acc, low, block_scales, factor, x_tile, 0, FORMAT, ZEROS, DTYPE, w_layout, 1
        )
        x_tile = x_buffers.index(2 * (stage * BLOCKS + i) + 1)
        acc = _multiply_half(
            acc, high, block_scales, factor, x_tile, 1, FORMAT, ZEROS, DTYPE, w_layout,
            0 if LAST and i + 1 == BLOCKS else 1,
        )  # fmt: skip
    return acc, scales


@gluon.jit
def scale_offsets(rows, scale_row_offset, stride, FORMAT: gl.constexpr):
    """Return the offset of the first scale of each of these weight rows."""
    scale_rows = rows
    if FORMAT.scale_rows == 0:
        scale_rows = rows * 0
    elif FORMAT.scale_rows > 1:
        scale_rows = (rows + scale_row_offset) // FORMAT.scale_rows
    return scale_rows * stride


@gluon.jit
def _produce(
    x_desc, w_desc, x_buffers, w_buffers, full, empty, n, m, begin, blocks, BLOCKS: gl.constexpr
):  # fmt: skip
    """Producer partition: copy blocks begin .. begin + blocks into the pipeline, BLOCKS a stage.

    The previous kernel writes x, and no kernel of a step writes the weight. So for few tokens the
    words of the first stages are copied before pdl_start(). No stage is complete without x, so
    consumers store after pdl_start(). Before that they read only scales, zero points and factors.
    Stages begin empty, in phase 1, or were filled once.
    """
    STAGES: gl.constexpr = full.shape[0]
    EARLY_STAGES: gl.constexpr = STAGES if x_buffers.shape[1] <= EARLY_TOKENS else 0
    early_blocks = gl.minimum(blocks, EARLY_STAGES * BLOCKS)
    for i in range(0, early_blocks, BLOCKS):
        copy_weight_blocks(w_desc, x_buffers, w_buffers, full, i // BLOCKS, n, begin + i, BLOCKS)
    pdl_start()
    for i in range(0, early_blocks, BLOCKS):
        copy_x_blocks(x_desc, x_buffers, full, i // BLOCKS, m, begin + i, BLOCKS)
    stage = 0
    phase = 0 if EARLY_STAGES else 1
    for i in range(early_blocks, blocks, BLOCKS):
        fill_stage(
            x_desc, w_desc, x_buffers, w_buffers, full, empty, stage, phase, n, m, begin + i,
            BLOCKS, 1,
        )  # fmt: skip
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def accumulate_pipeline(
    rows, scales_ptr, zeros_ptr, factors_ptr, x_buffers, w_buffers, full, empty, scale_row_offset,
    begin, blocks, scale_stride,
    FORMAT: gl.constexpr, BLOCKS: gl.constexpr, MMA_SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Multiply weight rows by tokens over `blocks` blocks that arrive through a pipeline.

    For the consumer warps. Blocks are numbered from `begin` on, for their scales.

    rows: [ROWS] int64 in row_layout, the weight rows whose scales are read.

    Returns: acc [ROWS, TOKENS] fp32 in accumulator_layout.
    """
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_buffers.shape[1]
    TOKENS: gl.constexpr = x_buffers.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    ZEROS: gl.constexpr = zeros_ptr is not None
    acc_layout: gl.constexpr = accumulator_layout(WARPS, TOKENS, MMA_SYNC)
    w_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    block_layout: gl.constexpr = words_layout(K_BLOCK, FORMAT.bits, WARPS, ROWS)
    half_layout: gl.constexpr = words_layout(HALF, FORMAT.bits, WARPS, ROWS)
    offsets = scale_offsets(rows, scale_row_offset, scale_stride, FORMAT)
    scales_ptr += offsets
    factor = None
    if FORMAT.kind == FP4:
        factor = prepare_factor(gl.load(factors_ptr + rows), FORMAT)
    if ZEROS:
        zeros_ptr += offsets
    acc = gl.zeros((ROWS, TOKENS), gl.float32, acc_layout)
    scales = load_scales(scales_ptr, zeros_ptr, begin, True, FORMAT)
    stage = 0
    phase = 0
    previous = 0
    for i in range(0, blocks - BLOCKS, BLOCKS):
        acc, scales = multiply_stage(
            acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, stage, phase,
            begin + i, FORMAT, BLOCKS, DTYPE, block_layout, half_layout, w_layout, False,
        )  # fmt: skip
        fence_async_shared()  # reads of this stage precede the copy engine's next write
        barrier()  # of all consumer warps, since one thread arrives for them
        if MMA_SYNC:
            mbarrier.arrive(empty.index(stage))
        else:
            # The last wgmma of this stage still reads it: release the stage before.
            mbarrier.arrive(empty.index(previous), pred=i > 0)
        previous = stage
        stage, phase = next_stage(stage, phase, STAGES)
    # Peeled: with the final wait inside the loop ptxas reads accumulators too early.
    total, scales = multiply_stage(
        acc, scales, scales_ptr, zeros_ptr, factor, x_buffers, w_buffers, full, stage, phase,
        begin + blocks - BLOCKS, FORMAT, BLOCKS, DTYPE, block_layout, half_layout, w_layout, True,
    )  # fmt: skip
    return total


@gluon.jit
def _consume(
    scales_ptr, zeros_ptr, factors_ptr, out_ptr, x_buffers, w_buffers, full, empty, tokens, N,
    scale_row_offset, n, m, begin, blocks, scale_stride, out_stride, FORMAT: gl.constexpr,
    BLOCKS: gl.constexpr, MMA_SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Consumer partition: dequantize, multiply, and store the tile at row n and token m."""
    ROWS: gl.constexpr = w_buffers.shape[1]
    TOKENS: gl.constexpr = x_buffers.shape[1]
    scale_row_layout: gl.constexpr = row_layout(FORMAT.bits, gl.num_warps(), ROWS)
    acc_layout: gl.constexpr = accumulator_layout(gl.num_warps(), TOKENS, MMA_SYNC)
    rows = gl.minimum(n + gl.arange(0, ROWS, scale_row_layout), N - 1).to(gl.int64)
    acc = accumulate_pipeline(
        rows, scales_ptr, zeros_ptr, factors_ptr, x_buffers, w_buffers, full, empty,
        scale_row_offset, begin, blocks, scale_stride, FORMAT, BLOCKS, MMA_SYNC, DTYPE,
    )  # fmt: skip
    # Epilogue: one rounding (partials stay fp32), stored straight from registers.
    outputs = n + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
    token = m + gl.arange(0, TOKENS, gl.SliceLayout(0, acc_layout))
    out_ptr += gl.program_id(2).to(gl.int64) * tokens * N
    offsets = token.to(gl.int64)[None, :] * out_stride + outputs[:, None]
    mask = (outputs < N)[:, None] & (token < tokens)[None, :]
    gl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["tokens", "all_blocks", "length", "scale_row_offset", "scale_stride"])
def pipeline_kernel(
    x_desc, w_desc, scales_ptr, zeros_ptr, factors_ptr, out_ptr, tokens, N, all_blocks, length,
    scale_row_offset, scale_stride, out_stride,
    FORMAT: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, MMA_SYNC: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Compute one split-K partition of one tile of out [parts, tokens, N], rows out_stride apart.

    all_blocks: blocks of K. length: blocks of a partition, the last one may have fewer; both are
    multiples of BLOCKS, the blocks of a stage. zeros and scales share scale_stride.
    """
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    x_buffers, w_buffers, full, empty = allocate_pipeline(
        x_desc, w_desc, ROWS, STAGES, BLOCKS, DTYPE
    )
    n = gl.program_id(0) * ROWS
    m = gl.program_id(1) * TOKENS
    begin = gl.program_id(2) * length
    blocks = gl.minimum(length, all_blocks - begin)
    gl.warp_specialize(
        [
            (_consume, (
                scales_ptr, zeros_ptr, factors_ptr, out_ptr, x_buffers, w_buffers, full, empty,
                tokens, N, scale_row_offset, n, m, begin, blocks, scale_stride, out_stride, FORMAT,
                BLOCKS, MMA_SYNC, DTYPE,
            )),
            (_produce, (
                x_desc, w_desc, x_buffers, w_buffers, full, empty, n, m, begin, blocks, BLOCKS,
            )),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
