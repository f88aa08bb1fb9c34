"""Launches of the experts' pipeline kernels, for few tokens with quantized weights on Hopper."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.compile_target import CompileTarget
from lockstep.kernels.device.pipeline import HALF
from lockstep.kernels.experts.pipeline_device import (
    BOX,
    down_pipeline_kernel,
    tile_width,
    up_pipeline_kernel,
)
from lockstep.kernels.experts.tiles import Tile
from lockstep.kernels.formats.weights import K_BLOCK, Fp4Weight, QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import WeightFormat
from lockstep.kernels.formats.weights.operand import (
    TL_DTYPES,
    choose_fma_decoder,
    has_irregular_groups,
    quantized_operand,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.linear.quantized import W_LAYOUTS, X_LAYOUT
from lockstep.kernels.linear.quantized_tuning import pipeline_can_read

ROWS = 64
"""Rows of a tile of up: 16 for each warp."""
WARPS = 4
"""Consumer warps."""
REGISTERS = 64
"""Registers per thread on average, so that four CTAs fit a multiprocessor."""
MAX_STAGE_BYTES = 40 << 10
"""Shared memory of a CTA's stages at most, so that four CTAs fit a multiprocessor's 227 KB.

us of up and down on an H200 with 60 KB, of which three CTAs fit, and with 40: DeepSeek-V3 in FP8
111.6 and 94, 35B-A3B at 4 tokens in FP8 40.8 and 35.2, in int4 30.0 and 26.1. At one token of the
35B, where up has fewer CTAs than that, 15.4 and 15.2, 12.8 and 12.8.
"""
MIN_WIDE_STAGES = 3
"""Stages have 256 columns where that many of them fit, else 128: two of 256 took 4 % longer."""
MIN_SLOTS = 5
"""Slots of a token. Rows of a tile of down are BOX for each of 8 or 16 slots: with fewer slots more
than a third of them would be dequantized for nothing."""
MAX_COLUMNS = 16
"""Slots or tokens: a product by mma.sync has 8 or 16 columns here."""


def up_tile(weight: Tensor | QuantizedWeight, tokens: int, target: CompileTarget) -> Tile | None:
    """Return the pipeline tile of up for this number of tokens; None where the kernel does not
    serve."""
    if tokens > MAX_COLUMNS:
        return None
    return _tile(weight, ROWS, 8 if tokens <= 8 else 16, target)


def down_tile(weight: Tensor | QuantizedWeight, slots: int, target: CompileTarget) -> Tile | None:
    """Return the pipeline tile of down for this number of slots; None where the kernel does not
    serve."""
    if not MIN_SLOTS <= slots <= MAX_COLUMNS:
        return None
    padded_slots = next_power_of_2(slots)
    return _tile(weight, int(BOX) * padded_slots, padded_slots, target)


def _tile(
    weight: Tensor | QuantizedWeight, rows: int, columns: int, target: CompileTarget
) -> Tile | None:
    """Return the tile of `rows` weight rows and `columns` x rows, with as many stages as fit."""
    if not isinstance(weight, QuantizedWeight) or has_irregular_groups(weight):
        return None
    if not pipeline_can_read(weight) or target.arch != HOPPER or not target.inline_ptx:
        return None
    blocks = ceil_div(weight.k, K_BLOCK)
    column_bytes = rows * weight.bits // 8 + 2 * columns
    wide_bytes = 2 * K_BLOCK * column_bytes * MIN_WIDE_STAGES
    k = K_BLOCK if blocks % 2 or wide_bytes > MAX_STAGE_BYTES else 2 * K_BLOCK
    stages = max(2, MAX_STAGE_BYTES // (k * column_bytes))
    return Tile(rows, columns, k, WARPS, min(stages, blocks * K_BLOCK // k))


def is_tma_aligned(x: Tensor) -> bool:
    """Return whether TMA can read x, of 16 bits."""
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.dtype != torch.float32


def _descriptors(x: Tensor, weight: QuantizedWeight, tile: Tile) -> tuple[TensorDescriptor, ...]:
    """Return the TMA descriptors of x and of the words."""
    words = [int(BOX), K_BLOCK * weight.bits // 32]
    return (
        TensorDescriptor.from_tensor(x, [tile.tokens, HALF.value], X_LAYOUT),
        TensorDescriptor.from_tensor(weight.words, words, W_LAYOUTS[weight.bits]),
    )


def _scale_args(
    weight: QuantizedWeight, dtype: torch.dtype, target: CompileTarget
) -> tuple[tuple[Any, ...], tuple[int, int, int], WeightFormat]:
    """Return (scales, zeros, factors), (blocks, scale_row_offset, scale_stride), the format."""
    operand, form = quantized_operand(weight, dtype, 0, target)
    form = choose_fma_decoder(form, weight, dtype)
    scales = operand.scales
    stride = operand.scale_stride
    if isinstance(weight, Fp4Weight):  # four e4m3 scales are read as one word
        scales = scales.view(torch.int32)
        stride = scales.stride(0)
    blocks = ceil_div(weight.k, K_BLOCK)
    pointers = (scales, operand.zeros, operand.factors)
    return pointers, (blocks, operand.scale_row_offset, stride), form


def _options(tile: Tile, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants and compiler options of a launch."""
    return dict(
        ROWS=tile.rows, STAGES=tile.stages, BLOCKS=tile.k // K_BLOCK, DTYPE=TL_DTYPES[dtype],
        num_warps=tile.warps, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


def up(
    x: Tensor, weight: QuantizedWeight, inner: int, experts: int, ids: Tensor, tile: Tile,
    target: CompileTarget, gated: bool,
) -> Tensor:  # fmt: skip
    """Return the activations of all pairs: [T * k, I]. x [T, H]: at most tile.tokens rows."""
    tokens, slots = ids.shape
    pairs = ids.numel()
    act = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    pointers, sizes, form = _scale_args(weight, x.dtype, target)
    up_pipeline_kernel[(pairs * ceil_div(inner, tile_width(tile.rows, gated)),)](
        *_descriptors(x, weight, tile), *pointers, act, ids, tokens, pairs, experts, inner, *sizes,
        GATED=gated, FORMAT=form, TOP_K=slots, LANES=next_power_of_2(pairs),
        **_options(tile, x.dtype),
    )  # fmt: skip
    return act


def down(
    act: Tensor, weight: QuantizedWeight, hidden: int, experts: int, ids: Tensor, weights: Tensor,
    shared: Tensor | None, gate: Tensor | None, strides: tuple[int, int, int], num_partials: int,
    tile: Tile, target: CompileTarget,
) -> Tensor:  # fmt: skip
    """Return the weighted sum over slots and the shared expert: [T, H].

    strides, num_partials: of shared and its gate, see triton.py.
    """
    tokens, slots = ids.shape
    out = torch.empty(tokens, hidden, dtype=act.dtype, device=act.device)
    pointers, sizes, form = _scale_args(weight, act.dtype, target)
    down_pipeline_kernel[(tokens, ceil_div(hidden, int(BOX)))](
        *_descriptors(act, weight, tile), *pointers, ids, weights, out, shared, gate, experts,
        hidden, *sizes, *strides, FORMAT=form, TOP_K=slots, PARTS=num_partials,
        **_options(tile, act.dtype),
    )  # fmt: skip
    return out
