# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""fp8_linear on Hopper, in Gluon: the bits of kernels.py.

A persistent CTA computes tiles of 128 outputs. It is warp-specialized: a producer warp copies
blocks of 128 columns, codes of both operands, by TMA through a multistage pipeline. Two consumer
warpgroups of 64 outputs each multiply a block by wgmma, release its stage, and add the block's sum
in fp32, while the other one multiplies. The producer copies the next tile's blocks while a tile is
stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

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

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.backends import gpu_trait, resolve_architecture
from lockstep.kernels.compile_target import CompileTarget, compile_target
from lockstep.kernels.device.pipeline import next_stage
from lockstep.kernels.device.swizzle import swizzled_tile
from lockstep.kernels.formats.weights import K_BLOCK as WORD_COLUMNS
from lockstep.kernels.formats.weights import Fp8Weight
from lockstep.kernels.fp8_linear import fp8_linear
from lockstep.kernels.fp8_linear.triton import (
    SCALE_ALIGNMENT,
    Fp8Tile,
    choose_tile,
    fp8_linear_triton,
    quantize_rows_triton,
    run_kernel,
)
from lockstep.kernels.linear import partition_length

K_BLOCK = gl.constexpr(WORD_COLUMNS)
"""Columns of a block, and of a stage."""
ROWS = gl.constexpr(64)
"""Outputs of a consumer warpgroup: the M of a wgmma."""
WIDE = gl.constexpr(128)
"""Tokens of the widest tile."""
CTA_ROWS = 2 * ROWS.value
"""Outputs of a tile."""
CODES_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
"""128-byte swizzle of codes: wgmma reads a block, and TMA writes it, without bank conflicts."""
SCALES_LAYOUT = gl.NVMMASharedLayout(0, 32, 1)
"""Scales of a block [tokens] fp32 in a row."""
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of the second consumer and of the producer; the first has the rest."""


@gluon.constexpr_function
def accumulator_layout(tokens):
    """Return the layout of accumulators [ROWS, tokens] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.constexpr_function
def store_layout(bits):
    """Return the layout of outputs [ROWS, tokens] for stores of 16 bytes along the outputs."""
    vector = 128 // bits
    return gl.BlockedLayout([vector, 1], [64 // vector, vector // 2], [1, 4], [0, 1])


@gluon.jit
def _blocks(part, step, length, all_blocks, COUNT: gl.constexpr):
    """Return the first block of partition `step` of a part, and the end of its blocks."""
    begin = (part * COUNT + step) * length
    return begin, gl.minimum(begin + length, all_blocks)


@gluon.jit
def _produce(
    x_desc, w_desc, x_scales_desc, x_stages, w_stages, x_scale_stages, full, empty, tokens, N,
    all_blocks, length, x_scale_stride, tiles, COUNT: gl.constexpr, GROUP: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: copy the blocks of all tiles of this CTA in the order of their use."""
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_stages.shape[1]
    BYTES: gl.constexpr = (w_stages.shape[1] + TOKENS) * K_BLOCK + (
        x_scale_stages.shape[1] * 4 if BY_BLOCK else 0
    )
    stage = 0
    phase = 1  # all stages begin empty
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        part, m, n = swizzled_tile(tile, tokens, N, GROUP, TOKENS, w_stages.shape[1])
        begin, _ = _blocks(part, 0, length, all_blocks, COUNT)
        _, end = _blocks(part, COUNT - 1, length, all_blocks, COUNT)
        for block in range(begin, end):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            column = block * K_BLOCK
            tma.async_copy_global_to_shared(w_desc, [n, column], ready, w_stages.index(stage))
            tma.async_copy_global_to_shared(x_desc, [m, column], ready, x_stages.index(stage))
            if BY_BLOCK:
                tma.async_copy_global_to_shared(
                    x_scales_desc, [block * x_scale_stride + m], ready, x_scale_stages.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _partition(
    w_scales_ptr, x_stages, w_stages, x_scale_stages, full, empty, turns, stage, phase, turn, begin,
    end, WARPGROUP: gl.constexpr, BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """Accumulate one split-K partition, blocks begin .. end.

    In wide tiles the warpgroups take turns at the tensor cores: while one adds its sums, the
    product of the other runs.

    w_scales_ptr: the outputs' scale of block 0. turns: a barrier for each warpgroup, which
    completes when the other one has ended a product. turn: parity of the next one.

    Returns: acc [ROWS, TOKENS], stage, phase, turn.
    """
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = x_stages.shape[1]
    TAKES_TURNS: gl.constexpr = TOKENS == WIDE
    layout: gl.constexpr = accumulator_layout(TOKENS)
    acc = gl.zeros((ROWS, TOKENS), gl.float32, layout)
    zeros = acc
    for block in range(begin, end):
        if BY_BLOCK:
            w_scale = gl.load(w_scales_ptr + block)
        mbarrier.wait(full.index(stage), phase)
        if TAKES_TURNS:
            # Warpgroup 0 begins: the phase before the first one of a fresh barrier is complete.
            mbarrier.wait(turns.index(WARPGROUP), turn ^ (1 - WARPGROUP))
            turn ^= 1
        w_block = w_stages.index(stage).slice(WARPGROUP * ROWS, ROWS)
        x_block = x_stages.index(stage).permute((1, 0))
        sums = warpgroup_mma(w_block, x_block, zeros, use_acc=False, is_async=True)
        if BY_BLOCK:
            # While the product runs.
            x_scales = x_scale_stages.index(stage).slice(0, TOKENS)
            scale = x_scales.load(gl.SliceLayout(0, layout)) * w_scale
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if TAKES_TURNS:
            mbarrier.arrive(turns.index(1 - WARPGROUP))
        if BY_BLOCK:
            fence_async_shared()  # reads of the scales precede the copy engine's next write
        mbarrier.arrive(empty.index(stage))
        if BY_BLOCK:
            sums = sums * scale[None, :]
        acc += sums
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase, turn


@gluon.jit
def _scale_rows(acc, x_scales_ptr, w_scale, m, tokens):
    """Multiply acc [ROWS, TOKENS] by the scales of its tokens, from m on, and of its outputs."""
    token = m + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    x_scale = gl.load(x_scales_ptr + token, mask=token < tokens, other=0.0)
    return acc * (x_scale[None, :] * w_scale[:, None])


@gluon.jit
def _store(acc, out_ptr, part, m, n, tokens, N, out_stride):
    """Store acc [ROWS, TOKENS], rounded once, at token m and output n of a part."""
    layout: gl.constexpr = store_layout(out_ptr.dtype.element_ty.primitive_bitwidth)
    # Through shared memory to 16-byte vectors: the accumulator's layout would store 2 bytes.
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    outputs = n + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    token = m + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    offsets = (part.to(gl.int64) * tokens + token)[None, :] * out_stride + outputs[:, None]
    mask = (outputs < N)[:, None] & (token < tokens)[None, :]
    gl.store(out_ptr + offsets, values, mask=mask)


@gluon.jit
def _consume(
    x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages, full, empty, turns,
    tokens, N, all_blocks, length, first_row, w_scale_stride, out_stride, tiles,
    WARPGROUP: gl.constexpr, COUNT: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    BY_BLOCK: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup number WARPGROUP of two: its 64 outputs of each tile of this CTA."""
    TOKENS: gl.constexpr = x_stages.shape[1]
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator_layout(TOKENS))
    stage = 0
    phase = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        part, m, n = swizzled_tile(tile, tokens, N, GROUP, TOKENS, w_stages.shape[1])
        n += WARPGROUP * ROWS
        # With a scale per block the 64 outputs have one scale row.
        w_scales = w_scales_ptr + (gl.minimum(n, N - 1) + first_row) // SCALE_ROWS * w_scale_stride
        row = gl.minimum(n + gl.arange(0, ROWS, row_layout), N - 1)
        for step in gl.static_range(COUNT):
            begin, end = _blocks(part, step, length, all_blocks, COUNT)
            acc, stage, phase, turn = _partition(
                w_scales, x_stages, w_stages, x_scale_stages, full, empty, turns, stage, phase,
                turn, begin, end, WARPGROUP, BY_BLOCK,
            )  # fmt: skip
            if not BY_BLOCK:
                w_scale = gl.load(w_scales_ptr + (row + first_row) // SCALE_ROWS * w_scale_stride)
                acc = _scale_rows(acc, x_scales_ptr, w_scale, m, tokens)
            if step == 0:
                total = acc
            else:
                total += acc
        _store(total, out_ptr, part, m, n, tokens, N, out_stride)


@gluon.jit(do_not_specialize=["tokens", "x_scale_stride", "tiles"])
def fp8_gemm_hopper_kernel(
    x_desc, w_desc, x_scales_desc, x_scales_ptr, w_scales_ptr, out_ptr, tokens, N, all_blocks,
    length, first_row, x_scale_stride, w_scale_stride, out_stride, tiles,
    COUNT: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr, BY_BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of out [parts, tokens, N] that belong to this CTA; see fp8_gemm_kernel.

    Args:
        x_desc, w_desc: codes [tokens, padded_k] and [N, padded_k] as e4m3.
        x_scales_ptr: [groups, tokens], groups x_scale_stride apart.
        all_blocks, length: blocks of K, and of a split-K partition.
        tiles: tiles of all parts.
        COUNT: split-K partitions that a tile adds up: 1 or 2.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    W_ROWS: gl.constexpr = w_desc.block_type.shape[0]
    w_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, W_ROWS, K_BLOCK], w_desc.layout)
    x_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, K_BLOCK], x_desc.layout)
    x_scale_stages = x_stages
    if BY_BLOCK:
        x_scale_stages = gl.allocate_shared_memory(
            gl.float32, [STAGES, x_scales_desc.block_type.shape[0]], x_scales_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both consumers
    # The copy engine (async proxy) must see the initialized barriers.
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages, full,
                empty, turns, tokens, N, all_blocks, length, first_row, w_scale_stride, out_stride,
                tiles, 0, COUNT, GROUP, SCALE_ROWS, BY_BLOCK,
            )),
            (_consume, (
                x_scales_ptr, w_scales_ptr, out_ptr, x_stages, w_stages, x_scale_stages, full,
                empty, turns, tokens, N, all_blocks, length, first_row, w_scale_stride, out_stride,
                tiles, 1, COUNT, GROUP, SCALE_ROWS, BY_BLOCK,
            )),
            (_produce, (
                x_desc, w_desc, x_scales_desc, x_stages, w_stages, x_scale_stages, full, empty,
                tokens, N, all_blocks, length, x_scale_stride, tiles, COUNT, GROUP, BY_BLOCK,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


STAGES = {16: 11, 32: 10, 64: 8, WIDE.value: 6}
"""Pipeline stages by tokens of a tile: the most that fit next to the buffer of the epilogue."""


@dataclass(frozen=True)
class HopperTile:
    """Tile of CTA_ROWS outputs and `tokens` tokens, a key of STAGES. Its size changes no bit.

    splits: split-K partitions are separate tiles, and a second pass adds them.
    """

    tokens: int
    splits: bool

    @property
    def stages(self) -> int:
        """Return the pipeline stages."""
        return STAGES[self.tokens]


NARROW = 64
"""Maximum tokens of a narrow tile."""
MAX_NARROW = 512
"""Maximum tokens of a product in narrow tiles, each of one split-K partition."""
GROUP = 16
"""Row tiles that share a column tile's weights in L2."""


def choose_hopper_tile(tokens: int, may_split: bool) -> HopperTile:
    """Return the tile. may_split: the partials may be written to memory.

    Times are in docs/kernels/fp8_linear.md.
    """
    is_narrow = tokens <= MAX_NARROW
    size = next(s for s in STAGES if min(tokens, NARROW) <= s) if is_narrow else WIDE.value
    return HopperTile(size, may_split and is_narrow)


def fits(weight: Fp8Weight, split_k: int) -> bool:
    """Return whether the kernel serves a weight: 64 outputs share a scale per block."""
    shared = weight.block_n % ROWS.value == 0 and weight.first % ROWS.value == 0
    return split_k <= 2 and (weight.block_k >= weight.k or shared)


def tile_of(
    tokens: int, weight: Fp8Weight, split_k: int, may_split: bool, target: CompileTarget
) -> HopperTile | Fp8Tile:
    """Return the tile of this kernel, or that of triton.py where the kernel does not run."""
    if target.arch == HOPPER and fits(weight, split_k):
        return choose_hopper_tile(tokens, may_split)
    return choose_tile(tokens, split_k, may_split, target)


def launch_hopper(
    x: Tensor,
    weight: Fp8Weight,
    split_k: int,
    tile: HopperTile,
    target: CompileTarget,
    out: Tensor,
) -> None:
    """Fill out [T, N], or partials [split_k, T, N] fp32 where the tile splits."""
    words, x_scales = quantize_rows_triton(x, weight.block_k)
    tokens = len(x)
    n, k = weight.shape
    codes = words.view(torch.float8_e4m3fn)
    x_desc = TensorDescriptor.from_tensor(codes, [tile.tokens, WORD_COLUMNS], CODES_LAYOUT)
    w_codes = weight.words.view(torch.float8_e4m3fn)
    w_desc = TensorDescriptor.from_tensor(w_codes, [CTA_ROWS, WORD_COLUMNS], CODES_LAYOUT)
    by_block = weight.block_k < k
    x_scales_desc = None
    if by_block:
        flat = x_scales.as_strided((x_scales.stride(1) * x_scales.shape[1],), (1,))
        copied = max(tile.tokens, SCALE_ALIGNMENT)
        x_scales_desc = TensorDescriptor.from_tensor(flat, [copied], SCALES_LAYOUT)
    count = 1 if tile.splits else split_k
    parts = split_k // count
    tiles = triton.cdiv(tokens, tile.tokens) * triton.cdiv(n, CTA_ROWS) * parts
    fp8_gemm_hopper_kernel[(min(tiles, target.num_sms),)](
        x_desc, w_desc, x_scales_desc, x_scales, weight.scales, out, tokens, n,
        triton.cdiv(k, WORD_COLUMNS), triton.cdiv(partition_length(k, split_k), WORD_COLUMNS),
        weight.first, x_scales.stride(1), weight.scales.stride(0), out.stride(-2), tiles,
        count, GROUP, weight.block_n, by_block, tile.stages,
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
    x: Tensor,
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
    tile = choose_hopper_tile(len(x), out is None)
    fill = partial(launch_hopper, x, weight, split_k, tile, target)
    num_partials = split_k if tile.splits else 1
    return run_kernel(fill, x, weight.shape[0], num_partials, allow_partials, out)
