# mypy: ignore-errors
"""linear with a packed weight, in Triton: unpacked in registers on its way into the matrix units.

Weights are the left operand, so that there is one tree whatever the number of tokens: with tokens
on the left, 16 of them would be mma.sync's with another order of columns, 64 wgmma's. The tree is
the op's, as in triton.py. Above MOST tokens, and where a layout does not suit the kernel,
the weight is unpacked first, into memory, and the dense backend multiplies. The bits are the same:
linear(x, packed) == linear(x, packed.dequantize(x.dtype)).
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.epochs import launch_epochs
from lockstep.kernels.formats.weights import Fp4Weight, GgufWeight, QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK, Operand
from lockstep.kernels.formats.weights.operand import (
    IN_PARTS,
    TYPES,
    Target,
    columns_of,
    group_of,
    irregular,
    operand_of,
    target_of,
)
from lockstep.kernels.formats.weights.triton import in_memory
from lockstep.kernels.linear import linear, partition_length
from lockstep.kernels.linear.quantized_gemm import packed_kernel
from lockstep.kernels.linear.quantized_gemv import lanes_kernel
from lockstep.kernels.linear.quantized_pipeline import HALF, ring_kernel
from lockstep.kernels.linear.quantized_tuning import MOST, UNPACK, PackedTile, block_tile, lookup
from lockstep.kernels.linear.stream_k import shared_ring_kernel
from lockstep.kernels.linear.triton import fold, linear_triton
from lockstep.kernels.linear.triton import launch as dense_launch
from lockstep.kernels.linear.tuning import Tile

GROUP = 8
"""Row tiles that share a column tile's weights in L2."""
X_LAYOUT = NVMMASharedLayout(128, 16, 2)
W_LAYOUTS = {4: NVMMASharedLayout(64, 32, 2), 8: NVMMASharedLayout(128, 32, 2)}
"""How a ring holds x and, by bits, words: rows of a block, where no two lanes meet in a bank."""
PLAIN = Tile(64, 64, 64, 4, 4)
"""Of 48 KB, for the bits that others must have."""


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    split_k: int,
    tile: PackedTile,
    target: Target,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """linear by a given tile. The tile decides the speed and nothing else."""
    (tokens, k) = x.shape
    n = weight.shape[0]
    if not (tile.laid_out or target.assembly):
        tile = block_tile(tile, weight, split_k, target.arch)
    split = min(tile.split, split_k)
    length = partition_length(k, split_k)
    found = x.new_empty(tokens, n) if out is None else out
    if split > 1:
        found = torch.empty(split, tokens, n, dtype=torch.float32, device=x.device)
    if tokens and tile.lanes:
        _lanes(x, weight, found, length, tile, target)
    elif tokens and tile.ring:
        _ring(x, weight, found, length, tile, target)
    elif tokens:
        columns = columns_of(weight, tile.k, length)
        operand, form = operand_of(weight, x.dtype, columns, target)
        if target.assembly and not tile.warpgroup:
            form = form._replace(opaque=True)
        grid = (triton.cdiv(tokens, tile.m) * triton.cdiv(n, tile.n) * split,)
        even = length % columns == 0 and k % columns == 0
        packed_kernel[grid](
            x, operand, found, tokens, n, k, length, x.stride(0), found.stride(-2),
            split_k // split, GROUP, tuple(form), even,
            tile.m, tile.n, columns, TYPES[x.dtype],
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers or None,
            enable_fp_fusion=False,
        )  # fmt: skip
    if split == 1 or (allow_partials and out is None):
        return found
    total = fold(found, x.dtype) if tokens else x.new_empty(0, n)
    return total if out is None else out.copy_(total)


def _lanes(
    x: Tensor, weight: QuantizedWeight, out: Tensor, length: int, tile: PackedTile, target: Target
) -> None:
    """Fills out [T, N], or partials [P, T, N] fp32, a program for each part of `length` columns."""
    tokens = x.shape[0]
    n = weight.shape[0]
    if x.stride(0) % 2 or x.data_ptr() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    operand, form = operand_of(weight, x.dtype, 0, target)
    if isinstance(weight, GgufWeight):
        operand = _in_words(operand)
    group = group_of(weight)
    block = int(BLOCK)
    batch = tile.m // 8
    blocks = length // block
    grid = (triton.cdiv(n, tile.n), triton.cdiv(tokens, tile.m), weight.k // length)
    lanes_kernel[grid](
        x.view(torch.int32), operand, out, tokens, n, blocks, x.stride(0) // 2,
        out.stride(-2), tuple(form), max(1, block // group) if group else 1,
        tile.n // (16 * tile.warps), batch, max(1, 8 // batch), tile.stages,
        blocks % tile.stages, tile.warps, TYPES[x.dtype],
        num_warps=tile.warps, num_stages=1, maxnreg=tile.registers or None,
        enable_fp_fusion=False,
    )  # fmt: skip


def _in_words(operand: Operand) -> Operand:
    """Return the operand of a GgufWeight with its scales and minima read as int32 words."""
    scales = operand.scales.view(torch.int32)
    minima = None if operand.zeros is None else operand.zeros.view(torch.int32)
    return operand._replace(scales=scales, zeros=minima, scale_stride=scales.stride(0))


def _ring(
    x: Tensor, weight: QuantizedWeight, out: Tensor, length: int, tile: PackedTile, target: Target
) -> None:
    """Fills out [T, N], or partials [P, T, N] fp32, a program for each part of `length` columns;
    the last one may be shorter."""
    tokens = x.shape[0]
    n = weight.shape[0]
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    operand, form = operand_of(weight, x.dtype, 0, target)
    scales = operand.scales
    stride = operand.scale_stride
    if isinstance(weight, Fp4Weight):
        scales = scales.view(torch.int32)
        stride = scales.stride(0)
        if x.dtype == torch.bfloat16 and weight.in_parts:
            form = form._replace(fast=IN_PARTS)
    x_map = TensorDescriptor.from_tensor(x, [tile.m, HALF.value], X_LAYOUT)
    block = int(BLOCK)
    words = [tile.n, block * weight.bits // 32]
    w_map = TensorDescriptor.from_tensor(weight.words, words, W_LAYOUTS[weight.bits])
    tiles = triton.cdiv(n, tile.n)
    high = triton.cdiv(tokens, tile.m)
    parts = triton.cdiv(weight.k, length)
    numbers = (scales, operand.zeros, operand.factors)
    lies = (operand.first, stride, out.stride(-2), tuple(form), tile.stages, tile.k // block,
            tile.sync, TYPES[x.dtype])  # fmt: skip
    options = dict(
        num_warps=tile.warps, maxnreg=tile.registers or None, enable_fp_fusion=False
    )  # fmt: skip
    programs = tile.share * target.processors // (high * parts)
    if 0 < programs < tiles and weight.k == parts * length:
        slots = length // tile.k
        (each, more) = divmod(tiles * slots, programs)
        epochs = launch_epochs(x.device)
        shared_ring_kernel[(programs, high, parts)](
            x_map, w_map, *numbers, out, *_hand_over(x, programs * high * parts, tile),
            epochs.generation, epochs.next_serial(), tokens, n, each, more, slots, *lies,
            **options,
        )  # fmt: skip
    else:
        ring_kernel[(tiles, high, parts)](
            x_map,
            w_map,
            *numbers,
            out,
            tokens,
            n,
            weight.k // block,
            length // block,
            *lies,
            **options,
        )


def _hand_over(x: Tensor, ctas: int, tile: PackedTile) -> tuple[Tensor, Tensor]:
    """Return memory in which CTAs of one launch leave partial sums for the next CTA.

    Returns: (sums [ctas * n * m] fp32, flags [ctas] int64), both uninitialized and of this launch
        alone, so that a weight may be in several launches at once.
    """
    size = ctas * tile.n * tile.m
    memory = x.new_empty(size + 2 * ctas, dtype=torch.float32)
    return memory[:size], memory[size:].view(torch.int64)


def tile_of(
    tokens: int, weight: QuantizedWeight, split_k: int, dtype: torch.dtype, arch: int
) -> PackedTile:
    """How x of this dtype meets a weight; UNPACK also where the kernel does not serve."""
    whole = split_k == 1 or partition_length(weight.k, split_k) % int(BLOCK) == 0
    served = tokens <= MOST and dtype != torch.float32
    if not (served and whole) or irregular(weight):
        return UNPACK
    return lookup(tokens, weight, split_k, dtype, arch)


def _dense(
    x: Tensor, weight: QuantizedWeight, split_k: int, allow_partials: bool, out: Tensor | None
) -> Tensor:
    """The weight unpacked into memory, and the dense backend."""
    return linear_triton(x, in_memory(weight, x.dtype), split_k, allow_partials, out)


def run_tile(
    split_k: int, allow_partials: bool, x: Tensor, weight: QuantizedWeight, tile: PackedTile
) -> Tensor:
    """linear by a given tile, UNPACK among them, on x's device: what the tuner times."""
    if tile == UNPACK:
        return _dense(x, weight, split_k, allow_partials, None)
    return launch(x, weight, split_k, tile, target_of(x.device), allow_partials)


def right_bits(split_k: int, x: Tensor, weight: QuantizedWeight) -> Tensor:
    """linear with the weight unpacked ahead, in a plain tile that any GPU takes."""
    return dense_launch(x, in_memory(weight, x.dtype), split_k, PLAIN)


def refusal(
    split_k: int, x: Tensor, weight: QuantizedWeight, want: Tensor, tile: PackedTile
) -> str | None:
    """Why a tile must not be used on this GPU, if so: it does not compile or fit, or has other
    bits than are wanted, right_bits."""
    try:
        found = run_tile(split_k, False, x, weight, tile)
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {error}"
    same = torch.equal(found.view(torch.int16), want.view(torch.int16))
    return None if same else "other bits"


def _supports(**traits: Any) -> str | None:
    if not traits.get("quantized"):
        return "the weight is not packed"
    return gpu_trait(**traits)


@linear.backend("quantized", supports=_supports)
def linear_quantized(
    x: Tensor,
    weight: QuantizedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear. Last strides must be 1."""
    target = target_of(x.device)
    tile = tile_of(x.shape[0], weight, split_k, x.dtype, target.arch)
    if tile == UNPACK:
        return _dense(x, weight, split_k, allow_partials, out)
    return launch(x, weight, split_k, tile, target, allow_partials, out)
