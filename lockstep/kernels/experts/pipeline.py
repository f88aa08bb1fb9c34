# mypy: ignore-errors
"""Launches of the experts' products through a ring (_ring.py), and where they serve: on Hopper, for
packed weights and few tokens."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.kernels.architecture import HOPPER
from lockstep.kernels.experts.pipeline_kernels import BOX, down_kernel, few_kernel, width_of
from lockstep.kernels.experts.tiles import Tile
from lockstep.kernels.formats.weights import Fp4Weight, QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK
from lockstep.kernels.formats.weights.operand import TYPES, Target, irregular, operand_of
from lockstep.kernels.linear.quantized import HALF, W_LAYOUTS, X_LAYOUT
from lockstep.kernels.linear.quantized_tuning import ring_reads

ROWS = 64
"""Of a block of up: 16 for each warp."""
WARPS = 4
"""That multiply."""
REGISTERS = 64
"""Of a thread on average, so that four programs fit a multiprocessor."""
BYTES = 40 << 10
"""That a program's ring holds at most, so that four programs fit a multiprocessor's 227 KB.

us of up and down on an H200 with 60 KB, which three fit, and with 40: DeepSeek-V3 in FP8 111.6 and
94, 35B-A3B at 4 tokens in FP8 40.8 and 35.2, in int4 30.0 and 26.1. At one token of the 35B, where
up has fewer programs than that, 15.4 and 15.2, 12.8 and 12.8.
"""
LEAST_SLOTS = 3
"""Slots have 256 columns where so many of these fit, else 128: two of 256 took 4 % longer."""
FEWEST = 5
"""Slots of a token. Rows of down's block are BOX for each of 8 or 16 slots: with fewer than these
more than a third of them would be unpacked for nothing."""
MOST = 16
"""Slots, or tokens: columns of a product by mma.sync are 8 or 16."""


def up_tile(weight: Tensor | QuantizedWeight, tokens: int, target: Target) -> Tile | None:
    """The ring of up for so many tokens; None where it does not serve."""
    if tokens > MOST:
        return None
    return _tile(weight, ROWS, 8 if tokens <= 8 else 16, target)


def down_tile(weight: Tensor | QuantizedWeight, slots: int, target: Target) -> Tile | None:
    """The ring of down for so many slots of a token; None where it does not serve."""
    if not FEWEST <= slots <= MOST:
        return None
    places = triton.next_power_of_2(slots)
    return _tile(weight, int(BOX) * places, places, target)


def _tile(weight: Tensor | QuantizedWeight, rows: int, tokens: int, target: Target) -> Tile | None:
    if not isinstance(weight, QuantizedWeight) or irregular(weight) or not ring_reads(weight):
        return None
    if target.arch != HOPPER or not target.assembly:
        return None
    block = int(BLOCK)
    blocks = triton.cdiv(weight.k, block)
    column = rows * weight.bits // 8 + 2 * tokens
    k = block if blocks % 2 or 2 * block * column * LEAST_SLOTS > BYTES else 2 * block
    held = max(2, BYTES // (k * column))
    return Tile(rows, tokens, k, WARPS, min(held, blocks * block // k))


def aligned(x: Tensor) -> bool:
    """Whether the copy engine can read x, of 16 bits."""
    whole = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return whole and x.dtype != torch.float32


def _maps(x: Tensor, weight: QuantizedWeight, tile: Tile) -> tuple[TensorDescriptor, ...]:
    """How the copy engine reads x and words."""
    words = [int(BOX), int(BLOCK) * weight.bits // 32]
    return (
        TensorDescriptor.from_tensor(x, [tile.tokens, HALF.value], X_LAYOUT),
        TensorDescriptor.from_tensor(weight.words, words, W_LAYOUTS[weight.bits]),
    )


def _numbers(weight: QuantizedWeight, dtype: torch.dtype, target: Target):
    """Of a weight: (scales, zeros, factors), (blocks, first, stride of scales), its form."""
    operand, form = operand_of(weight, dtype, 0, target)
    scales = operand.scales
    stride = operand.scale_stride
    if isinstance(weight, Fp4Weight):
        scales = scales.view(torch.int32)
        stride = scales.stride(0)
    blocks = triton.cdiv(weight.k, int(BLOCK))
    return (scales, operand.zeros, operand.factors), (blocks, operand.first, stride), tuple(form)


def _options(tile: Tile, dtype: torch.dtype) -> dict[str, object]:
    return dict(
        ROWS=tile.rows, SLOTS=tile.stages, COUNT=tile.k // int(BLOCK), DTYPE=TYPES[dtype],
        num_warps=tile.warps, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


def up(
    x: Tensor, weight: QuantizedWeight, inner: int, experts: int, ids: Tensor, tile: Tile,
    target: Target, gated: bool,
) -> Tensor:  # fmt: skip
    """What every pair's down is given: [T * k, I]. x [T, H]: at most tile.tokens."""
    (tokens, slots) = ids.shape
    pairs = ids.numel()
    act = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    numbers, sizes, form = _numbers(weight, x.dtype, target)
    few_kernel[(pairs * triton.cdiv(inner, width_of(tile.rows, gated)),)](
        *_maps(x, weight, tile), *numbers, act, ids, tokens, pairs, experts, inner, *sizes,
        GATED=gated, FORM=form, TOP_K=slots, LANES=triton.next_power_of_2(pairs),
        **_options(tile, x.dtype),
    )  # fmt: skip
    return act


def down(
    act: Tensor, weight: QuantizedWeight, hidden: int, experts: int, ids: Tensor, weights: Tensor,
    shared: Tensor | None, gate: Tensor | None, strides: tuple[int, int, int], parts: int,
    tile: Tile, target: Target,
) -> Tensor:  # fmt: skip
    """The weighted sum over slots and the shared expert: [T, H]. strides, parts: of shared and its
    gate, as the sum's kernel takes them."""
    (tokens, slots) = ids.shape
    out = torch.empty(tokens, hidden, dtype=act.dtype, device=act.device)
    numbers, sizes, form = _numbers(weight, act.dtype, target)
    down_kernel[(tokens, triton.cdiv(hidden, int(BOX)))](
        *_maps(act, weight, tile), *numbers, ids, weights, out, shared, gate, experts, hidden,
        *sizes, *strides, FORM=form, TOP_K=slots, PARTS=parts, **_options(tile, act.dtype),
    )  # fmt: skip
    return out
