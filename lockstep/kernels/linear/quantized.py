"""linear with a quantized weight, in Triton: dequantized in registers, multiplied by tensor cores.

The weight is the left operand, so that the tree does not depend on the number of tokens: with
tokens on the left, 16 of them would run on mma.sync in another order of columns than 64 on wgmma.
The tree is the op's, as in triton.py. Above MAX_TOKENS, and where a format does not suit the
kernels, the weight is first dequantized into memory and the dense backend multiplies. The bits are
equal: linear(x, w) == linear(x, w.dequantize(x.dtype)).
"""

from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import CompileTarget, compile_target
from lockstep.kernels.device.pipeline import HALF, K_BLOCK
from lockstep.kernels.epochs import launch_epochs
from lockstep.kernels.formats.weights import Fp4Weight, GgufWeight, QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import WeightOperand
from lockstep.kernels.formats.weights.operand import (
    SPLIT_FACTOR_FP4,
    TL_DTYPES,
    choose_fma_decoder,
    fit_block_k,
    group_size_of,
    has_irregular_groups,
    quantized_operand,
)
from lockstep.kernels.formats.weights.triton import dequantize_to_memory
from lockstep.kernels.integers import ceil_div
from lockstep.kernels.linear import linear, partition_length
from lockstep.kernels.linear.quantized_gemm import quantized_gemm_kernel
from lockstep.kernels.linear.quantized_gemv import quantized_gemv_kernel
from lockstep.kernels.linear.quantized_pipeline import pipeline_kernel
from lockstep.kernels.linear.quantized_tuning import (
    DEQUANTIZE_FIRST,
    MAX_TOKENS,
    QuantizedTile,
    compiler_tile,
    lookup,
)
from lockstep.kernels.linear.stream_k import stream_k_kernel
from lockstep.kernels.linear.triton import launch as dense_launch
from lockstep.kernels.linear.triton import linear_triton, reduce_partials
from lockstep.kernels.linear.tuning import Tile

GROUP = 8
"""Row tiles that share a column tile's weights in L2."""
X_LAYOUT = NVMMASharedLayout(128, 16, 2)
W_LAYOUTS = {4: NVMMASharedLayout(64, 32, 2), 8: NVMMASharedLayout(128, 32, 2)}
"""Swizzled shared-memory layouts of x and, by bits, of words: no two lanes of a load meet in a
bank."""
REFERENCE_TILE = Tile(64, 64, 64, 4, 4)
"""Dense tile of 48 KB that fits every GPU: its bits are what quantized tiles are compared with."""


def launch(
    x: Tensor,
    weight: QuantizedWeight,
    split_k: int,
    tile: QuantizedTile,
    target: CompileTarget,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Run linear with a given tile, which decides the speed and nothing else."""
    tokens, k = x.shape
    n = weight.shape[0]
    if not (tile.laid_out or target.inline_ptx):
        tile = compiler_tile(tile, weight, split_k, target.arch)
    ctas_k = min(tile.ctas_k, split_k)
    length = partition_length(k, split_k)
    y = x.new_empty(tokens, n) if out is None else out
    if ctas_k > 1:
        y = torch.empty(ctas_k, tokens, n, dtype=torch.float32, device=x.device)
    if tokens and tile.gemv:
        _launch_gemv(x, weight, y, length, tile, target)
    elif tokens and tile.pipeline:
        _launch_pipeline(x, weight, y, length, tile, target)
    elif tokens:
        _launch_gemm(x, weight, y, length, split_k // ctas_k, tile, target)
    if ctas_k == 1 or (allow_partials and out is None):
        return y
    total = reduce_partials(y, x.dtype) if tokens else x.new_empty(0, n)
    return total if out is None else out.copy_(total)


def _launch_gemm(
    x: Tensor, weight: QuantizedWeight, out: Tensor, length: int, count: int,
    tile: QuantizedTile, target: CompileTarget,
) -> None:  # fmt: skip
    """Fill out [T, N], or partials [P, T, N] fp32; each CTA adds `count` partitions."""
    tokens, k = x.shape
    n = weight.shape[0]
    block_k = fit_block_k(weight, tile.k, length)
    operand, form = quantized_operand(weight, x.dtype, block_k, target)
    if target.inline_ptx and not tile.wgmma:
        form = form._replace(opaque=True)  # mma.sync: the compiler must not widen kWidth
    parts = out.numel() // (tokens * n)
    grid = (ceil_div(tokens, tile.m) * ceil_div(n, tile.n) * parts,)
    even = length % block_k == 0 and k % block_k == 0
    quantized_gemm_kernel[grid](
        x, operand, out, tokens, n, k, length, x.stride(0), out.stride(-2), count, GROUP, form,
        even, tile.m, tile.n, block_k,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers or None,
        enable_fp_fusion=False,
    )  # fmt: skip


def _launch_gemv(
    x: Tensor, weight: QuantizedWeight, out: Tensor, length: int, tile: QuantizedTile,
    target: CompileTarget,
) -> None:  # fmt: skip
    """Fill out [T, N], or partials [P, T, N] fp32, one CTA row per partition of `length`
    columns."""
    tokens = x.shape[0]
    n = weight.shape[0]
    if x.stride(0) % 2 or x.data_ptr() % 4:  # x is read in words of two columns
        x = x.clone(memory_format=torch.contiguous_format)
    operand, form = quantized_operand(weight, x.dtype, 0, target)
    if isinstance(weight, GgufWeight):
        operand = _scales_as_words(operand)
    group = group_size_of(weight)
    block = int(K_BLOCK)
    batch = tile.m // 8
    blocks = length // block
    grid = (ceil_div(n, tile.n), ceil_div(tokens, tile.m), weight.k // length)
    quantized_gemv_kernel[grid](
        x.view(torch.int32), operand, out, tokens, n, blocks, x.stride(0) // 2,
        out.stride(-2), form, max(1, block // group) if group else 1,
        tile.n // (16 * tile.warps), batch, max(1, 8 // batch), tile.stages,
        blocks % tile.stages, tile.warps, TL_DTYPES[x.dtype],
        num_warps=tile.warps, num_stages=1, maxnreg=tile.registers or None,
        enable_fp_fusion=False,
    )  # fmt: skip


def _scales_as_words(operand: WeightOperand) -> WeightOperand:
    """Return the operand of a GgufWeight with its scales and minima viewed as int32 words."""
    scales = operand.scales.view(torch.int32)
    minima = None if operand.zeros is None else operand.zeros.view(torch.int32)
    return operand._replace(scales=scales, zeros=minima, scale_stride=scales.stride(0))


def _launch_pipeline(
    x: Tensor, weight: QuantizedWeight, out: Tensor, length: int, tile: QuantizedTile,
    target: CompileTarget,
) -> None:  # fmt: skip
    """Fill out [T, N], or partials [P, T, N] fp32, by the pipeline kernel or by stream-K.

    A partition has `length` columns; the last one may be shorter.
    """
    tokens = x.shape[0]
    n = weight.shape[0]
    if x.stride(0) % 8 or x.data_ptr() % 16:  # TMA needs 16-byte aligned rows
        x = x.clone(memory_format=torch.contiguous_format)
    operand, form = quantized_operand(weight, x.dtype, 0, target)
    form = choose_fma_decoder(form, weight, x.dtype)
    scales = operand.scales
    scale_stride = operand.scale_stride
    if isinstance(weight, Fp4Weight):
        scales = scales.view(torch.int32)
        scale_stride = scales.stride(0)
        if x.dtype == torch.bfloat16 and weight.has_split_factors:
            form = form._replace(decoder=SPLIT_FACTOR_FP4)
    x_desc = TensorDescriptor.from_tensor(x, [tile.m, HALF.value], X_LAYOUT)
    block = int(K_BLOCK)
    words = [tile.n, block * weight.bits // 32]
    w_desc = TensorDescriptor.from_tensor(weight.words, words, W_LAYOUTS[weight.bits])
    tiles_n = ceil_div(n, tile.n)
    tiles_m = ceil_div(tokens, tile.m)
    parts = ceil_div(weight.k, length)
    pointers = (scales, operand.zeros, operand.factors)
    layout = (operand.scale_row_offset, scale_stride, out.stride(-2), form, tile.stages,
              tile.k // block, tile.mma_sync, TL_DTYPES[x.dtype])  # fmt: skip
    options = dict(num_warps=tile.warps, maxnreg=tile.registers or None, enable_fp_fusion=False)
    ctas = tile.stream_k * target.num_sms // (tiles_m * parts)
    if 0 < ctas < tiles_n and weight.k == parts * length:
        tile_iterations = length // tile.k
        iterations, remainder = divmod(tiles_n * tile_iterations, ctas)
        epochs = launch_epochs(x.device)
        stream_k_kernel[(ctas, tiles_m, parts)](
            x_desc, w_desc, *pointers, out, *_hand_over_buffers(x, ctas * tiles_m * parts, tile),
            epochs.generation, epochs.next_serial(), tokens, n, iterations, remainder,
            tile_iterations, *layout, **options,
        )  # fmt: skip
    else:
        pipeline_kernel[(tiles_n, tiles_m, parts)](
            x_desc, w_desc, *pointers, out, tokens, n, weight.k // block, length // block,
            *layout, **options,
        )  # fmt: skip


def _hand_over_buffers(x: Tensor, ctas: int, tile: QuantizedTile) -> tuple[Tensor, Tensor]:
    """Allocate the buffers in which CTAs of a stream-K launch pass accumulators to the next CTA.

    Returns: (partials [ctas * n * m] fp32, flags [ctas] int64), both uninitialized and of this
        launch alone, so that a weight may be in several launches at once.
    """
    size = ctas * tile.n * tile.m
    memory = x.new_empty(size + 2 * ctas, dtype=torch.float32)
    return memory[:size], memory[size:].view(torch.int64)


def tile_of(
    tokens: int,
    weight: QuantizedWeight,
    split_k: int,
    dtype: torch.dtype,
    target: CompileTarget,
) -> QuantizedTile:
    """Return the tile for x of this dtype; DEQUANTIZE_FIRST also where no kernel serves."""
    whole_blocks = split_k == 1 or partition_length(weight.k, split_k) % int(K_BLOCK) == 0
    served = tokens <= MAX_TOKENS and dtype != torch.float32
    if not (served and whole_blocks) or has_irregular_groups(weight):
        return DEQUANTIZE_FIRST
    return lookup(tokens, weight, split_k, dtype, target.arch, target.num_sms)


def _dequantize_and_multiply(
    x: Tensor, weight: QuantizedWeight, split_k: int, allow_partials: bool, out: Tensor | None
) -> Tensor:
    """Dequantize the weight into memory and run the dense backend."""
    dense = dequantize_to_memory(weight, x.dtype)
    y: Tensor = linear_triton(x, dense, split_k, allow_partials, out)
    return y


def run_tile(
    split_k: int, allow_partials: bool, x: Tensor, weight: QuantizedWeight, tile: QuantizedTile
) -> Tensor:
    """Run linear with a given tile or DEQUANTIZE_FIRST. The tuner times this."""
    if tile == DEQUANTIZE_FIRST:
        return _dequantize_and_multiply(x, weight, split_k, allow_partials, None)
    return launch(x, weight, split_k, tile, compile_target(x.device), allow_partials)


def expected_output(split_k: int, x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Run linear with the weight dequantized in memory, in a dense tile that fits any GPU."""
    return dense_launch(x, dequantize_to_memory(weight, x.dtype), split_k, REFERENCE_TILE)


def refusal(
    split_k: int, x: Tensor, weight: QuantizedWeight, expected: Tensor, tile: QuantizedTile
) -> str | None:
    """Return why a tile must not be used on this GPU, None if it may.

    It may not compile or fit, or differ in bits from `expected` (see expected_output).
    """
    try:
        y = run_tile(split_k, False, x, weight, tile)
    except (RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {error}"
    same = torch.equal(y.view(torch.int16), expected.view(torch.int16))
    return None if same else "other bits"


def _supports(**traits: Any) -> str | None:
    if not traits.get("quantized"):
        return "the weight is not quantized"
    return gpu_trait(**traits)


@linear.backend("quantized", supports=_supports)
def linear_quantized(
    x: Tensor,
    weight: QuantizedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.contract.linear. Last strides must be 1."""
    target = compile_target(x.device)
    tile = tile_of(x.shape[0], weight, split_k, x.dtype, target)
    if tile == DEQUANTIZE_FIRST:
        return _dequantize_and_multiply(x, weight, split_k, allow_partials, out)
    return launch(x, weight, split_k, tile, target, allow_partials, out)
