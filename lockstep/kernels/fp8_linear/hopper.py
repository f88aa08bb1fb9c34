# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""fp8_linear on Hopper, in Gluon: the bits of kernels.py.

A persistent CTA is warp-specialized: a producer warp copies blocks of 128 columns, codes of both
operands, by TMA through a multistage pipeline. Two consumer warpgroups each take 64 rows of the
left operand of wgmma. They multiply a block, release its stage, and add the block's sum in fp32,
while the other one multiplies. The producer copies the next tile's blocks while a tile is stored.

In narrow tiles the left operand is the weight, so that few tokens need few products. In wide ones
it is x: a thread then has the scales of 2 tokens instead of 32. Both orders give the same bits.

A global load in the loop would delay the products, since ptxas places the use of a scale between
them. So all scales are read from shared memory.
"""

from dataclasses import dataclass
from functools import partial
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.backends import gpu_trait, resolve_architecture
from lockstep.kernels.compile_target import CompileTarget, compile_target
from lockstep.kernels.device.dependent_launch import pdl_start, pdl_wait
from lockstep.kernels.device.pipeline import next_stage
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.formats.weights import K_BLOCK as WORD_COLUMNS
from lockstep.kernels.formats.weights import Fp8Weight
from lockstep.kernels.fp8_linear import QuantizedRows, fp8_linear
from lockstep.kernels.fp8_linear.triton import (
    SCALE_ALIGNMENT,
    Fp8Tile,
    choose_tile,
    fp8_linear_triton,
    rows_of,
    run_kernel,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.linear import partition_length

K_BLOCK = gl.constexpr(WORD_COLUMNS)
"""Columns of a block, and of a stage."""
ROWS = gl.constexpr(64)
"""Rows of the left operand of a consumer warpgroup: the M of a wgmma."""
CTA_ROWS = 2 * ROWS.value
"""Rows of the left operand of a tile: outputs of a narrow one, tokens of a wide one."""
CODES_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
"""128-byte swizzle of codes: wgmma reads a block, and TMA writes it, without bank conflicts."""
SCALES_LAYOUT = gl.NVMMASharedLayout(0, 32, 1)
"""Scales of a block [tokens] fp32 in a row, as TMA writes them."""
ROW_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Scales of a weight row fp32 in a row."""
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of the second consumer and of the producer; the first has the rest."""


@gluon.constexpr_function
def accumulator_layout(columns):
    """Return the layout of accumulators [ROWS, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def store_layout(bits, X_IS_LEFT, columns):
    """Return the layout in which results [ROWS, columns] are stored, along the outputs.

    16-bit results pass through shared memory to vectors of 16 bytes, and so do those with the
    outputs in rows. An accumulator has pairs of columns, which fill sectors of 32 bytes as fp32.
    """
    vector = 128 // bits
    if not X_IS_LEFT:
        return gl.BlockedLayout([vector, 1], [64 // vector, vector // 2], [1, 4], [0, 1])
    if bits == 32:
        return accumulator_layout(columns)
    threads = columns // vector
    return gl.BlockedLayout([1, vector], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def _blocks(part, step, length, all_blocks, COUNT: gl.constexpr):
    """Return the first block of partition `step` of a part, and the end of its blocks."""
    begin = (part * COUNT + step) * length
    return begin, gl.minimum(begin + length, all_blocks)


@gluon.jit
def _tile_blocks(
    tile, tokens, N, all_blocks, length, COUNT: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Return the first token and output of a tile, its first block, and the end of its blocks."""
    part, m, n = swizzled_tile(tile, tokens, N, GROUP, TOKENS, OUTPUTS)
    begin, _ = _blocks(part, 0, length, all_blocks, COUNT)
    _, end = _blocks(part, COUNT - 1, length, all_blocks, COUNT)
    return m, n, begin, end


@gluon.jit
def _copy_weight(w_desc, w_stages, full, stage, n, block, BYTES: gl.constexpr):
    """Expect all bytes of an empty stage, and start the TMA copy of the weight's block."""
    ready = full.index(stage)
    mbarrier.expect(ready, BYTES)
    tma.async_copy_global_to_shared(w_desc, [n, block * K_BLOCK], ready, w_stages.index(stage))


@gluon.jit
def _produce(
    x_desc, w_desc, x_scales_desc, x_stages, w_stages, x_scale_stages, full, empty, tokens, N,
    all_blocks, length, x_scale_stride, tiles, COUNT: gl.constexpr, GROUP: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: copy the blocks of all tiles of this CTA in the order of their use.

    The previous kernel writes x, and no kernel of a step writes the weight. So the weight's blocks
    of the first stages are copied before pdl_start(). No stage is complete without x, so consumers
    store their first tile after pdl_start(). The next tile is computed at the end of the loop, so
    that no division delays the first copy of x.
    """
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_stages.shape[1]
    OUTPUTS: gl.constexpr = w_stages.shape[1]
    BYTES: gl.constexpr = (OUTPUTS + TOKENS) * K_BLOCK + (
        x_scale_stages.shape[1] * 4 if BY_BLOCK else 0
    )
    m, n, begin, end = _tile_blocks(
        gl.program_id(0), tokens, N, all_blocks, length, COUNT, GROUP, TOKENS, OUTPUTS
    )
    early_blocks = gl.minimum(end - begin, STAGES)
    for i in range(early_blocks):
        _copy_weight(w_desc, w_stages, full, i, n, begin + i, BYTES)
    pdl_start()
    stage = 0
    phase = 1  # all stages begin empty
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for block in range(begin, end):
            if early_blocks == 0:
                mbarrier.wait(empty.index(stage), phase)
                _copy_weight(w_desc, w_stages, full, stage, n, block, BYTES)
            early_blocks = gl.maximum(early_blocks - 1, 0)
            ready = full.index(stage)
            column = block * K_BLOCK
            tma.async_copy_global_to_shared(x_desc, [m, column], ready, x_stages.index(stage))
            if BY_BLOCK:
                tma.async_copy_global_to_shared(
                    x_scales_desc, [block * x_scale_stride + m], ready, x_scale_stages.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)
        m, n, begin, end = _tile_blocks(
            tile + gl.num_programs(0), tokens, N, all_blocks, length, COUNT, GROUP, TOKENS, OUTPUTS
        )


@gluon.jit
def _partition(
    x_stages, w_stages, x_scale_stages, w_scales, full, empty, stage, phase, begin, end,
    WARPGROUP: gl.constexpr, BY_BLOCK: gl.constexpr, X_IS_LEFT: gl.constexpr,
):  # fmt: skip
    """Accumulate one split-K partition, blocks begin .. end.

    X_IS_LEFT: x is the left operand of wgmma and the weight the right one, else the reverse.
    w_scales: shared memory [blocks, 1] with the scale of the warpgroup's outputs.

    Returns: acc [ROWS, columns of the right operand], stage, phase.
    """
    STAGES: gl.constexpr = full.shape[0]
    left_stages = x_stages if X_IS_LEFT else w_stages
    right_stages = w_stages if X_IS_LEFT else x_stages
    COLUMNS: gl.constexpr = right_stages.shape[1]
    layout: gl.constexpr = accumulator_layout(COLUMNS)
    # Axis of the outputs in acc, which a vector of tokens lacks.
    OUTPUT_AXIS: gl.constexpr = 1 if X_IS_LEFT else 0
    FIRST_TOKEN: gl.constexpr = WARPGROUP * ROWS if X_IS_LEFT else 0
    TOKENS: gl.constexpr = ROWS if X_IS_LEFT else COLUMNS
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    zeros = acc
    for block in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        left_tile = left_stages.index(stage).slice(WARPGROUP * ROWS, ROWS)
        right_tile = right_stages.index(stage).permute((1, 0))
        sums = warpgroup_mma(left_tile, right_tile, zeros, use_acc=False, is_async=True)
        if BY_BLOCK:
            # While the product runs.
            scales: gl.constexpr = gl.SliceLayout(OUTPUT_AXIS, layout)
            x_scale = x_scale_stages.index(stage).slice(FIRST_TOKEN, TOKENS).load(scales)
            scale = x_scale * w_scales.index(block).load(scales)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if BY_BLOCK:
            fence_async_shared()  # reads of the scales precede the copy engine's next write
        mbarrier.arrive(empty.index(stage))
        if BY_BLOCK:
            sums, scale = gl.broadcast(sums, gl.expand_dims(scale, OUTPUT_AXIS))
            acc = gl.fma(sums, scale, acc)
        else:
            acc += sums
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _scale_result(
    acc, x_scales_ptr, w_scales_ptr, m, n, tokens, N, first_row, w_scale_stride,
    SCALE_ROWS: gl.constexpr, X_IS_LEFT: gl.constexpr,
):  # fmt: skip
    """Multiply acc by the scales of its tokens, from m on, and of its outputs, from n on."""
    layout: gl.constexpr = acc.type.layout
    OUTPUT_AXIS: gl.constexpr = 1 if X_IS_LEFT else 0
    TOKEN_AXIS: gl.constexpr = 1 - OUTPUT_AXIS
    token = m + gl.arange(0, acc.shape[TOKEN_AXIS], gl.SliceLayout(OUTPUT_AXIS, layout))
    output = n + gl.arange(0, acc.shape[OUTPUT_AXIS], gl.SliceLayout(TOKEN_AXIS, layout))
    x_scale = gl.load(x_scales_ptr + token, mask=token < tokens, other=0.0)
    scale_row = (gl.minimum(output, N - 1) + first_row) // SCALE_ROWS
    w_scale = gl.load(w_scales_ptr + scale_row * w_scale_stride)
    return acc * (gl.expand_dims(x_scale, OUTPUT_AXIS) * gl.expand_dims(w_scale, TOKEN_AXIS))


@gluon.jit
def _store(acc, out_ptr, part, m, n, tokens, N, out_stride, X_IS_LEFT: gl.constexpr):
    """Store acc, rounded once, at token m and output n of a part."""
    BITS: gl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = store_layout(BITS, X_IS_LEFT, acc.shape[1])
    OUTPUT_AXIS: gl.constexpr = 1 if X_IS_LEFT else 0
    TOKEN_AXIS: gl.constexpr = 1 - OUTPUT_AXIS
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    output = n + gl.arange(0, acc.shape[OUTPUT_AXIS], gl.SliceLayout(TOKEN_AXIS, layout))
    token = m + gl.arange(0, acc.shape[TOKEN_AXIS], gl.SliceLayout(OUTPUT_AXIS, layout))
    rows = (part.to(gl.int64) * tokens + token) * out_stride
    offsets = gl.expand_dims(rows, OUTPUT_AXIS) + gl.expand_dims(output, TOKEN_AXIS)
    mask = gl.expand_dims(token < tokens, OUTPUT_AXIS) & gl.expand_dims(output < N, TOKEN_AXIS)
    gl.store(out_ptr + offsets, values, mask=mask)


@gluon.jit
def _consume(
    x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages, w_scale_rows, full,
    empty, tokens, N, all_blocks, length, first_row, w_scale_stride, out_stride, tiles,
    WARPGROUP: gl.constexpr, COUNT: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    BY_BLOCK: gl.constexpr, X_IS_LEFT: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup number WARPGROUP of two: its half of each tile of this CTA.

    Plain loads read x's scales per token, which the previous kernel writes, so they follow a wait.
    """
    w_scales = w_scale_rows
    if BY_BLOCK:
        SCALES: gl.constexpr = w_scale_rows.shape[1]
        w_scale_row = w_scale_rows.index(WARPGROUP)
        w_scales = w_scale_row._reinterpret(gl.float32, [SCALES, 1], ROW_LAYOUT)
        block = gl.arange(0, SCALES, gl.BlockedLayout([1], [32], [4], [0]))
    else:
        pdl_wait()
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        part, m, n = swizzled_tile(tile, tokens, N, GROUP, x_stages.shape[1], w_stages.shape[1])
        if X_IS_LEFT:
            m += WARPGROUP * ROWS
        else:
            n += WARPGROUP * ROWS
        if BY_BLOCK:
            # The outputs of a warpgroup have one scale row.
            scale_row = (gl.minimum(n, N - 1) + first_row) // SCALE_ROWS
            scale_ptrs = w_scales_ptr + scale_row * w_scale_stride + block
            w_scale_row.store(gl.load(scale_ptrs, mask=block < all_blocks, other=0.0))
        for step in gl.static_range(COUNT):
            begin, end = _blocks(part, step, length, all_blocks, COUNT)
            acc, stage, phase = _partition(
                x_stages, w_stages, x_scale_stages, w_scales, full, empty, stage, phase, begin,
                end, WARPGROUP, BY_BLOCK, X_IS_LEFT,
            )  # fmt: skip
            if not BY_BLOCK:
                acc = _scale_result(
                    acc, x_scales_ptr, w_scales_ptr, m, n, tokens, N, first_row, w_scale_stride,
                    SCALE_ROWS, X_IS_LEFT,
                )  # fmt: skip
            if step == 0:
                total = acc
            else:
                total += acc
        _store(total, out_ptr, part, m, n, tokens, N, out_stride, X_IS_LEFT)


@gluon.jit(do_not_specialize=["tokens", "x_scale_stride", "tiles"])
def fp8_gemm_hopper_kernel(
    x_desc, w_desc, x_scales_desc, x_scales_ptr, w_scales_ptr, out_ptr, tokens, N, all_blocks,
    length, first_row, x_scale_stride, w_scale_stride, out_stride, tiles,
    COUNT: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr, BY_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of out [parts, tokens, N] that belong to this CTA; see fp8_gemm_kernel.

    Args:
        x_desc, w_desc: codes [tokens, padded_k] and [N, padded_k] as e4m3.
        x_scales_ptr: [groups, tokens], groups x_scale_stride apart.
        all_blocks, length: blocks of K, and of a split-K partition.
        tiles: tiles of all parts.
        COUNT: split-K partitions that a tile adds up: 1 or 2.
        SCALES: scales of a weight row, rounded up to a power of two.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    W_ROWS: gl.constexpr = w_desc.block_type.shape[0]
    X_IS_LEFT: gl.constexpr = TOKENS == 2 * ROWS
    w_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W_ROWS, K_BLOCK], w_desc.layout)
    x_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, K_BLOCK], x_desc.layout)
    x_scale_stages = x_stages
    w_scale_rows = x_stages
    if BY_BLOCK:
        x_scale_stages = gl.allocate_shared_memory(
            gl.float32, [STAGES, x_scales_desc.block_type.shape[0]], x_scales_desc.layout
        )
        w_scale_rows = gl.allocate_shared_memory(gl.float32, [2, SCALES], ROW_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both consumers
    # The copy engine (async proxy) must see the initialized barriers.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages,
                w_scale_rows, full, empty, tokens, N, all_blocks, length, first_row,
                w_scale_stride, out_stride, tiles, 0, COUNT, GROUP, SCALE_ROWS, BY_BLOCK,
                X_IS_LEFT,
            )),
            (_consume, (
                x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages,
                w_scale_rows, full, empty, tokens, N, all_blocks, length, first_row,
                w_scale_stride, out_stride, tiles, 1, COUNT, GROUP, SCALE_ROWS, BY_BLOCK,
                X_IS_LEFT,
            )),
            (_produce, (
                x_desc, w_desc, x_scales_desc, x_stages, w_stages, x_scale_stages, full, empty,
                tokens, N, all_blocks, length, x_scale_stride, tiles, COUNT, GROUP, BY_BLOCK,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


STAGES = {(16, 128): 11, (32, 128): 10, (64, 128): 8, (CTA_ROWS, 64): 8, (CTA_ROWS, 128): 6}
"""Pipeline stages by (tokens, outputs) of a tile: the most that fit with the epilogue's buffer."""


@dataclass(frozen=True)
class HopperTile:
    """Tile of tokens and outputs, a key of STAGES. It changes no bit.

    Up to 64 tokens, 128 outputs are the left operand of wgmma. Otherwise 128 tokens are.

    splits: split-K partitions are separate tiles, and a second pass adds them.
    """

    tokens: int
    outputs: int
    splits: bool

    @property
    def stages(self) -> int:
        """Return the pipeline stages."""
        return STAGES[self.tokens, self.outputs]


NARROW = 64
"""Maximum tokens of a narrow tile."""
MAX_SPLIT_TOKENS = 128
"""Maximum tokens of a product whose split-K partitions are tiles of their own."""
MAX_SCALES = 512
"""Maximum blocks of a weight row, whose scales are in shared memory: K = 65,536."""
GROUP = 16
"""Row tiles that share a column tile's weights in L2."""


def choose_hopper_tile(tokens: int, weight: Fp8Weight, split_k: int, may_split: bool) -> HopperTile:
    """Return the tile. may_split: the partials may be written to memory.

    docs/kernels/fp8_linear.md has the times of all tiles. More kinds of tiles would gain little,
    and a prompt could need a kernel that no step at the start has launched.
    """
    splits = may_split and split_k > 1 and tokens <= MAX_SPLIT_TOKENS
    if tokens <= NARROW:
        size = next(size for size, _ in STAGES if tokens <= size)
        return HopperTile(size, CTA_ROWS, splits)
    outputs = CTA_ROWS if shares_scale(weight, CTA_ROWS) else ROWS.value
    return HopperTile(CTA_ROWS, outputs, splits)


def shares_scale(weight: Fp8Weight, outputs: int) -> bool:
    """Return whether `outputs` successive outputs share the scale of a block, if it has one."""
    is_aligned = weight.block_n % outputs == 0 and weight.first % outputs == 0
    return weight.block_k >= weight.k or is_aligned


def fits(weight: Fp8Weight, split_k: int) -> bool:
    """Return whether the kernel serves a weight: 64 outputs share a scale per block."""
    can_hold_scales = ceil_div(weight.k, WORD_COLUMNS) <= MAX_SCALES
    return split_k <= 2 and can_hold_scales and shares_scale(weight, ROWS.value)


def tile_of(
    tokens: int, weight: Fp8Weight, split_k: int, may_split: bool, target: CompileTarget
) -> HopperTile | Fp8Tile:
    """Return the tile of this kernel, or that of triton.py where the kernel does not run."""
    if target.arch == HOPPER and fits(weight, split_k):
        return choose_hopper_tile(tokens, weight, split_k, may_split)
    return choose_tile(tokens, split_k, may_split, target)


def launch_hopper(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight,
    split_k: int,
    tile: HopperTile,
    target: CompileTarget,
    out: Tensor,
) -> None:
    """Fill out [T, N], or partials [split_k, T, N] fp32 where the tile splits."""
    words, x_scales = rows_of(x, weight.block_k)
    tokens = len(x)
    n, k = weight.shape
    codes = words.view(torch.float8_e4m3fn)
    x_desc = TensorDescriptor.from_tensor(codes, [tile.tokens, WORD_COLUMNS], CODES_LAYOUT)
    w_codes = weight.words.view(torch.float8_e4m3fn)
    w_desc = TensorDescriptor.from_tensor(w_codes, [tile.outputs, WORD_COLUMNS], CODES_LAYOUT)
    by_block = weight.block_k < k
    x_scales_desc = None
    if by_block:
        flat = x_scales.as_strided((x_scales.stride(1) * x_scales.shape[1],), (1,))
        copied = max(tile.tokens, SCALE_ALIGNMENT)
        x_scales_desc = TensorDescriptor.from_tensor(flat, [copied], SCALES_LAYOUT)
    count = 1 if tile.splits else split_k
    parts = split_k // count
    tiles = ceil_div(tokens, tile.tokens) * ceil_div(n, tile.outputs) * parts
    blocks = ceil_div(k, WORD_COLUMNS)
    fp8_gemm_hopper_kernel[(min(tiles, target.num_sms),)](
        x_desc, w_desc, x_scales_desc, x_scales, weight.scales, out, tokens, n,
        blocks, ceil_div(partition_length(k, split_k), WORD_COLUMNS),
        weight.first, x_scales.stride(1), weight.scales.stride(0), out.stride(-2), tiles,
        count, GROUP, weight.block_n, by_block, tile.stages, next_power_of_2(blocks),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _supports(**traits: Any) -> str | None:
    """Return None if this kernel serves a layer of these traits, else the reason why not."""
    reason = gpu_trait(**traits)
    if reason is None and resolve_architecture(**traits) != HOPPER:
        return "wgmma exists on Hopper only"
    return reason


@fp8_linear.backend("hopper", supports=_supports)
def fp8_linear_hopper(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.fp8_linear.contract.fp8_linear. Last strides must be 1.

    Weights that do not fit go through triton.py.
    """
    if not fits(weight, split_k):
        return fp8_linear_triton(x, weight, split_k, allow_partials, out)
    target = compile_target(x.device)
    tile = choose_hopper_tile(len(x), weight, split_k, out is None)
    fill = partial(launch_hopper, x, weight, split_k, tile, target)
    num_partials = split_k if tile.splits else 1
    return run_kernel(fill, x, weight.shape[0], num_partials, allow_partials, out)
