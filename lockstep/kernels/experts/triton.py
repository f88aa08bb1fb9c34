"""experts in Triton: dispatch, grouped_mlp and combine in two launches, or four with a sort.

Few tokens need no sort: the CTAs of `up` find the pairs of their expert among all pairs, and `down`
is fused with combine. More tokens are sorted by expert into tiles (dispatch.py); then come up, down
and combine. On Hopper few tokens with quantized weights have separate kernels (pipeline.py).
Quantized weights are dequantized into memory first from DEQUANTIZE_FROM pairs per expert on, in
fp32, and where their groups are irregular. See docs/kernels/experts.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.activations import Act
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.exchange import Gather, all_columns
from lockstep.kernels.experts import count_experts, experts, pipeline
from lockstep.kernels.experts.dispatch import FIELDS, sort_pairs
from lockstep.kernels.experts.kernels import (
    combine_kernel,
    down_combine_kernel,
    down_kernel,
    up_kernel,
)
from lockstep.kernels.experts.tiles import (
    DEQUANTIZE_FROM,
    Tile,
    Tiles,
    fit_dense_tile,
    fit_quantized_tile,
    runs_unsorted,
    tiles_of,
    without_tma,
)
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import WeightFormat, WeightOperand
from lockstep.kernels.formats.weights.operand import (
    dense_operand,
    has_irregular_groups,
    quantized_operand,
)
from lockstep.kernels.formats.weights.triton import dequantize_to_memory
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.linear.triton import is_tma_aligned

MAX_EXPERTS = 512
"""Experts of a CTA of the sort."""
MAX_SLOTS = 32
COMBINE_COLUMNS = 1024
"""Columns of a CTA of combine: 8 values a thread, loads of 16 bytes."""
COMBINE_WARPS = 4


@dataclass(frozen=True)
class _WeightArgs:
    """Kernel arguments of a weight with k columns, and the tile that reads it."""

    operand: WeightOperand | TensorDescriptor
    form: WeightFormat
    tile: Tile
    k: int

    def options(self, min_tokens: int = 0) -> dict[str, Any]:
        """Return the launch options. min_tokens: tokens of a block at least."""
        tile = self.tile
        return dict(
            FORMAT=self.form, EVEN=self.k % tile.k == 0,
            BLOCK_N=tile.rows, BLOCK_M=max(tile.tokens, min_tokens), BLOCK_K=tile.k,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip


def _weight_args(
    weight: Tensor | QuantizedWeight, dense_tile: Tile, quantized_tile: Tile, x: Tensor,
    dequantize_first: bool = False,
) -> _WeightArgs:  # fmt: skip
    """Return how a kernel reads a weight for x of the model's dtype, by the tile of its kind.

    dequantize_first: dequantize into memory whatever the format.
    """
    k = weight.shape[-1]
    target = compile_target(x.device)
    if isinstance(weight, QuantizedWeight):
        in_registers = not dequantize_first and x.dtype != torch.float32
        if in_registers and not has_irregular_groups(weight):
            tile = fit_quantized_tile(quantized_tile, weight, target.arch)
            operand, form = quantized_operand(weight, x.dtype, tile.k, target)
            return _WeightArgs(operand, form, tile, k)
        weight = dequantize_to_memory(weight, x.dtype)
    tile = fit_dense_tile(dense_tile, x.dtype, target.arch)
    if tile.tma and is_tma_aligned(weight.view(-1, k)):
        descriptor = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.rows, tile.k])
        return _WeightArgs(descriptor, WeightFormat(), tile, k)
    return _WeightArgs(*dense_operand(weight), without_tma(tile), k)


def _launch_up(
    x: Tensor, up: _WeightArgs, inner: int, count: int, ids: Tensor, order: Tensor | None,
    table: Tensor | None, gated: bool,
) -> Tensor:  # fmt: skip
    """Return the activations of all pairs: [T * k, I], or in tile order [tiles * tokens, I].

    order, table: of dispatch.sort_pairs, None without a sort.
    """
    pairs = ids.numel()
    tiles = pairs if table is None else len(table)
    lanes = 1 if table is not None else next_power_of_2(pairs)
    rows = pairs if order is None else order.numel()
    act = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    width = up.tile.rows // 2 if gated else up.tile.rows
    up_kernel[(tiles * ceil_div(inner, width),)](
        x, up.operand, act, ids, order, table, pairs, x.stride(0), count, up.k, inner,
        GATED=gated, SLOTS=ids.shape[1], SORTED=table is not None, LANES=lanes, FIELDS=FIELDS,
        **up.options(),
    )  # fmt: skip
    return act


def launch_unsorted(
    x: Tensor, up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, ids: Tensor,
    weights: Tensor, shared: Tensor | None, gate: Tensor | None, tiles: Tiles, gated: bool = True,
    count: int | None = None, gather: Gather = all_columns,
) -> Tensor:  # fmt: skip
    """Run experts for few tokens in two launches, without a sort. gated: act is silu_mul."""
    tokens, slots = ids.shape
    count = count or count_experts(up, down)
    hidden = _rows(down, count)
    inner = down.shape[-1]
    local_inner = _rows(up, count) // (2 if gated else 1)
    target = compile_target(x.device)
    tile = pipeline.up_tile(up, tokens, target) if pipeline.is_tma_aligned(x) else None
    if tile is not None and isinstance(up, QuantizedWeight):
        act = pipeline.up(x, up, local_inner, count, ids, tile, target, gated)
    else:
        args = _weight_args(up, tiles.up, tiles.quantized_up, x)
        act = _launch_up(x, args, local_inner, count, ids, None, None, gated)
    act = gather(act)
    shared_args = (shared, gate, _strides(shared, gate), _num_partials(shared))
    tile = pipeline.down_tile(down, slots, target) if pipeline.is_tma_aligned(act) else None
    if tile is not None and isinstance(down, QuantizedWeight):
        return pipeline.down(act, down, hidden, count, ids, weights, *shared_args, tile, target)
    padded_slots = next_power_of_2(slots)
    args = _weight_args(down, tiles.down, tiles.quantized_down, x)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    down_combine_kernel[(tokens, ceil_div(hidden, args.tile.rows // padded_slots))](
        act, args.operand, ids, weights, out, shared, gate, count, inner, hidden,
        *_strides(shared, gate), SLOTS=slots, PADDED_SLOTS=padded_slots,
        PARTS=_num_partials(shared), **args.options(min_tokens=padded_slots),
    )  # fmt: skip
    return out


def launch_sorted(
    x: Tensor, up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, ids: Tensor,
    weights: Tensor, shared: Tensor | None, gate: Tensor | None, tiles: Tiles, gated: bool = True,
    count: int | None = None, gather: Gather = all_columns,
) -> Tensor:  # fmt: skip
    """Run experts for any number of tokens, sorted into tiles. gated: act is silu_mul."""
    tokens, slots = ids.shape
    count = count or count_experts(up, down)
    hidden = _rows(down, count)
    inner = down.shape[-1]
    local_inner = _rows(up, count) // (2 if gated else 1)
    pairs = ids.numel()
    dequantize_first = pairs >= DEQUANTIZE_FROM * count
    order, table = sort_pairs(ids, count, tiles.up.tokens)
    args = _weight_args(up, tiles.up, tiles.quantized_up, x, dequantize_first)
    act = gather(_launch_up(x, args, local_inner, count, ids, order, table, gated))
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    args = _weight_args(down, tiles.down, tiles.quantized_down, x, dequantize_first)
    tile = args.tile
    act_arg = TensorDescriptor.from_tensor(act, [tile.tokens, tile.k]) if tile.tma else act
    down_kernel[(len(table) * ceil_div(hidden, tile.rows),)](
        act_arg, args.operand, y, order, table, pairs, count, inner, hidden, FIELDS,
        TMA=tile.tma, **args.options(),
    )  # fmt: skip
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    combine_kernel[(tokens, ceil_div(hidden, COMBINE_COLUMNS))](
        y, weights, out, shared, gate, hidden, *_strides(shared, gate),
        SLOTS=slots, PARTS=_num_partials(shared), BLOCK=COMBINE_COLUMNS,
        num_warps=COMBINE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _rows(weight: Tensor | QuantizedWeight, count: int) -> int:
    """Return the output columns of one of `count` experts."""
    return weight.shape[1] if isinstance(weight, Tensor) else weight.shape[0] // count


def _strides(shared: Tensor | None, gate: Tensor | None) -> tuple[int, int, int]:
    """Return the strides between tokens of shared, between its partials, and of the gate."""
    shared_strides = (0, 0) if shared is None else (shared.stride(-2), shared.stride(0))
    return (*shared_strides, 0 if gate is None else gate.stride(0))


def _num_partials(shared: Tensor | None) -> int:
    """Return the number of partials of shared, 1 where it is a result."""
    return 1 if shared is None or shared.dim() < 3 else shared.shape[0]


def _supports(**traits: Any) -> str | None:
    count = traits.get("experts", 1)
    slots = traits.get("top_k", 1)
    if count > MAX_EXPERTS or slots > MAX_SLOTS:
        return f"top {slots} of {count} experts exceeds top {MAX_SLOTS} of {MAX_EXPERTS}"
    return gpu_trait(**traits)


@experts.backend("triton", supports=_supports)
def experts_triton(
    x: Tensor,
    up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    act: Act = "silu_mul",
    count: int | None = None,
    gather: Gather = all_columns,
) -> Tensor:
    """See lockstep.kernels.experts.contract.experts.

    up, down, ids and weights are contiguous; the last strides of x and shared are 1.
    """
    count = count or count_experts(up, down)
    if not ids.numel():
        return x.new_empty(len(x), _rows(down, count))
    tokens, slots = ids.shape
    unsorted = runs_unsorted(tokens, slots, count, isinstance(down, QuantizedWeight))
    tiles = tiles_of(ids.numel(), count, x.dtype, unsorted)
    launch = launch_unsorted if unsorted else launch_sorted
    gated = act == "silu_mul"
    arguments = (x, up, down, ids, weights, shared, shared_gate, tiles, gated)
    return launch(*arguments, count, gather)
