# mypy: ignore-errors
"""experts in Triton, in two forms of equal bits; T alone chooses between them.

Few tokens: two launches. A program of the first finds the pairs (token, slot) of its expert among
all and makes gate, up and their product; one of the second makes some columns of one token out of
all its slots. Many: pairs are sorted into tiles of one expert each, and gate and up, down, and the
sum over slots are a launch each.

Weights are the left operand everywhere, so that wgmma serves any number of tokens and packed
weights keep one K order (docs/kernels/experts.md). A kernel sees a weight as rows, row n of expert
e at e * N + n, and reads it by lockstep.kernels.formats.weights.dequantize_tile. Packed weights are
unpacked into memory first from UNPACK_FROM on, in fp32, and where their scales lie irregularly. On
Hopper a few tokens meet packed weights in kernels of their own (pipeline.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.kernels.activations import Act
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.activations import relu2, sigmoid, silu_product
from lockstep.kernels.experts import count_experts, experts, pipeline
from lockstep.kernels.experts.dispatch import FIELDS, clamped, sort_pairs
from lockstep.kernels.experts.tiles import (
    UNPACK_FROM,
    Tile,
    Tiles,
    are_few,
    fitting,
    packed_fitting,
    tiles_of,
    without_tma,
)
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.dequantize_tile import Form, Operand, chain
from lockstep.kernels.formats.weights.operand import (
    irregular,
    operand_of,
    plain_operand,
    target_of,
)
from lockstep.kernels.formats.weights.triton import in_memory
from lockstep.kernels.linear.triton import aligned, partition_product, tree_load

MOST_EXPERTS = 512
"""Experts that the sort's programs hold at once."""
MOST_SLOTS = 32
COLUMNS = 1024
"""Of a program of the sum over slots: 8 numbers a thread, loads of 16 bytes."""
WARPS = 4
"""Of the same."""


@triton.jit
def _tile_of(
    ids, order, table, tile, pairs, experts,
    SORTED: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """-> expert of a tile (-1: none), its pairs [BLOCK_M], which of them there are.

    Not SORTED: a tile is a pair's. Of the pairs of one expert, every BLOCK_M-th has a tile of
    itself and the BLOCK_M - 1 after it; the others have none.
    """
    lane = tl.arange(0, BLOCK_M)
    if SORTED:
        expert = tl.load(table + tile * FIELDS)
        live = lane < tl.load(table + tile * FIELDS + 1)
        own = tl.load(order + tile * BLOCK_M + lane)
        return expert, tl.where(live, own, 0), live
    else:
        pair = tl.arange(0, LANES)
        every = clamped(ids, pair, pair < pairs, experts)
        expert = tl.max(tl.where(pair == tile, every, -1), 0)
        same = (every == expert).to(tl.int32)
        before = tl.sum(tl.where(pair < tile, same, 0), 0)
        place = tl.cumsum(same, 0) - 1 - before
        mine = (same[None, :] > 0) & (place[None, :] == lane[:, None])
        own = tl.sum(tl.where(mine, pair[None, :], 0), 1)
        live = before + lane < tl.sum(same, 0)
        return tl.where(before % BLOCK_M == 0, expert, -1), own, live


@triton.jit(do_not_specialize=["pairs"])
def _up_kernel(
    x, weight, act, ids, order, table, pairs, x_stride, experts, K, inner,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr, SORTED: tl.constexpr, LANES: tl.constexpr, FIELDS: tl.constexpr,
    FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """act: a tile's silu(gate) * up, or max(up, 0)^2 where there is no gate.

    It is [pairs, inner], and [tiles * BLOCK_M, inner] where they are SORTED: in the order of tiles.

    With one, rows of the weight's block are 8 of gate and the 8 of up beside them in turn, so that
    wgmma leaves both factors of a product in one thread: it holds rows r and r + 8. Those past the
    end are copies of the last one, computed and not stored.
    """
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    blocks = tl.cdiv(inner, WIDTH)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * WIDTH
    expert, own, live = _tile_of(
        ids, order, table, tile, pairs, experts, SORTED, LANES, FIELDS, BLOCK_M
    )
    if expert < 0:
        return
    row = tl.arange(0, BLOCK_N)
    if GATED:
        column = first + row // 16 * 8 + row % 8
        within = row % 16 // 8 * inner + tl.minimum(column, inner - 1)
        rows = expert.to(tl.int64) * 2 * inner + within
    else:
        rows = expert.to(tl.int64) * inner + tl.minimum(first + row, inner - 1)
    first_row = (own // SLOTS).to(tl.int64) * x_stride
    inputs = x + first_row[:, None] + tl.arange(0, BLOCK_K)[None, :]
    total = chain(
        weight, rows, inputs, live[:, None], 0, K, FORM, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
        act.dtype.element_ty,
    )  # fmt: skip
    dtype = act.dtype.element_ty
    if GATED:
        halves = tl.reshape(total, (BLOCK_N // 16, 2, 8, BLOCK_M))
        gate, up = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        product = silu_product(gate.to(dtype), up.to(dtype), dtype)
    else:
        product = relu2(total.to(dtype).to(tl.float32)).to(dtype)
    column = first + tl.arange(0, WIDTH)
    if SORTED:
        own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    to = act + own.to(tl.int64)[None, :] * inner + column[:, None]
    mask = live[None, :] & (column < inner)[:, None]
    tl.store(to, tl.reshape(product, (WIDTH, BLOCK_M)), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    act, weight, y, order, table, pairs, experts, K, hidden,
    FIELDS: tl.constexpr, FORM: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [pairs, hidden]: a tile's outputs, each an expert's of one token.

    act: in the order of tiles; what lies behind a tile's pairs is multiplied and not stored. TMA:
    act and weight are descriptors.
    """
    blocks = tl.cdiv(hidden, BLOCK_N)
    tile = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    expert, own, live = _tile_of(None, order, table, tile, pairs, experts, True, 1, FIELDS, BLOCK_M)
    if expert < 0:
        return
    if TMA:
        total = partition_product(
            act, weight, None, tile * BLOCK_M, expert * hidden + first, 0, K,
            True, True, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        rows = expert.to(tl.int64) * hidden + tl.minimum(column, hidden - 1)
        place = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inputs = act + place[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        total = chain(
            weight, rows, inputs, live[:, None], 0, K, FORM, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
            act.dtype.element_ty,
        ).T  # fmt: skip
    to = y + own.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=live[:, None] & (column < hidden)[None, :])


@triton.jit
def _shared_part(
    shared, gate, token, column, live, shared_stride, part, gate_stride,
    PARTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """What the shared expert adds to columns of a token's sum: fp32. It gave the sum of PARTS
    partials, `part` numbers apart, rounded to DTYPE."""
    at = token * shared_stride + column
    last = tree_load(shared, at, part.to(tl.int64), live, PARTS).to(DTYPE).to(tl.float32)
    if gate is not None:
        share = tl.load(gate + token * gate_stride + tl.zeros_like(column)).to(tl.float32)
        last = (sigmoid(share).to(DTYPE).to(tl.float32) * last).to(DTYPE).to(tl.float32)
    return last


@triton.jit(do_not_specialize=["part"])
def _sum_kernel(
    y, weights, out, shared, gate, hidden, shared_stride, part, gate_stride,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, hidden]: BLOCK columns of a token, its slots added in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        own = token * SLOTS + slot
        found = tl.load(y + own * hidden + column, mask=live, other=0.0)
        total += tl.load(weights + own).to(tl.float32) * found.to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if shared is not None:
        total += _shared_part(
            shared, gate, token, column, live, shared_stride, part, gate_stride, PARTS, dtype
        )
    tl.store(out + token * hidden + column, total.to(dtype), mask=live)


@triton.jit
def _in_order(total, parts):
    """total [C] + each of parts [a power of two, C], in ascending order."""
    COUNT: tl.constexpr = parts.shape[0]
    if COUNT == 1:
        return total + tl.reshape(parts, (parts.shape[1],))
    else:
        halves = tl.reshape(parts, (2, COUNT // 2, parts.shape[1]))
        low, high = tl.split(tl.permute(halves, (1, 2, 0)))
        return _in_order(_in_order(total, low), high)


@triton.jit(do_not_specialize=["part"])
def _down_sum_kernel(
    act, weight, ids, weights, out, shared, gate, experts, K, hidden, shared_stride, part,
    gate_stride,
    SLOTS: tl.constexpr, PLACES: tl.constexpr, PARTS: tl.constexpr,
    FORM: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N // PLACES columns of one token: PLACES is SLOTS, filled up to a power of two.

    The weight's block holds these columns of every slot's expert, that of act the token's slots, so
    one wgmma serves all; of what it makes, an expert's rows count for its own slot. Places past
    the slots hold the last one's expert and count for none. What the sum needs is loaded before the
    weights, so that nothing is waited for behind them.
    """
    token = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = BLOCK_N // PLACES
    first = tl.program_id(1) * WIDTH
    place = tl.arange(0, PLACES)
    share = tl.load(weights + token * SLOTS + place, mask=place < SLOTS, other=0.0)
    column = first + tl.arange(0, WIDTH)
    inside = column < hidden
    dtype: tl.constexpr = out.dtype.element_ty
    if shared is not None:
        last = _shared_part(
            shared, gate, token, column, inside, shared_stride, part, gate_stride, PARTS, dtype
        )
    row = tl.arange(0, BLOCK_N)
    of_row = tl.minimum(row // WIDTH, SLOTS - 1)
    expert = clamped(ids + token * SLOTS, of_row, of_row < SLOTS, experts)
    rows = expert.to(tl.int64) * hidden + tl.minimum(first + row % WIDTH, hidden - 1)
    slot = tl.arange(0, BLOCK_M)
    live = slot < SLOTS
    inputs = act + (token * SLOTS + slot)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    total = chain(
        weight, rows, inputs, live[:, None], 0, K, FORM, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
        act.dtype.element_ty,
    )  # fmt: skip
    own = ((row // WIDTH)[:, None] == slot[None, :]) & live[None, :]
    y = tl.sum(tl.where(own, total, 0.0), 1).to(act.dtype.element_ty).to(tl.float32)
    parts = tl.reshape(y, (PLACES, WIDTH)) * share.to(tl.float32)[:, None]
    summed = _in_order(tl.zeros((WIDTH,), tl.float32), parts)
    if shared is not None:
        summed += last
    tl.store(out + token * hidden + column, summed.to(dtype), mask=inside)


@dataclass(frozen=True)
class _Reading:
    """How a launch reads a weight of k columns: what the kernel is given of it, and the tile."""

    operand: Operand | TensorDescriptor
    form: Form
    tile: Tile
    k: int

    def options(self, tokens: int = 0) -> dict[str, Any]:
        """The launch's options. tokens: at least so many in a block."""
        tile = self.tile
        return dict(
            FORM=tuple(self.form), EVEN=self.k % tile.k == 0,
            BLOCK_N=tile.rows, BLOCK_M=max(tile.tokens, tokens), BLOCK_K=tile.k,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip


def _reading(
    weight: Tensor | QuantizedWeight, tile: Tile, packed: Tile, x: Tensor, unpack: bool = False
) -> _Reading:
    """How x of the model's dtype meets a weight. tile: a plain one's; packed: a packed one's;
    unpack: into memory."""
    k = weight.shape[-1]
    target = target_of(x.device)
    if isinstance(weight, QuantizedWeight):
        if not unpack and x.dtype != torch.float32 and not irregular(weight):
            fitted = packed_fitting(packed, weight, target.arch)
            operand, form = operand_of(weight, x.dtype, fitted.k, target)
            return _Reading(operand, form, fitted, k)
        weight = in_memory(weight, x.dtype)
    fitted = fitting(tile, x.dtype, target.arch)
    if fitted.tma and aligned(weight.view(-1, k)):
        rows = TensorDescriptor.from_tensor(weight.view(-1, k), [fitted.rows, fitted.k])
        return _Reading(rows, Form(), fitted, k)
    return _Reading(*plain_operand(weight), without_tma(fitted), k)


def _act(
    x: Tensor, up: _Reading, inner: int, experts: int, ids: Tensor, order: Tensor | None,
    table: Tensor | None, gated: bool,
) -> Tensor:  # fmt: skip
    """What every pair's down is given: [T * k, I], or in the order of tiles [tiles * tokens, I]."""
    pairs = ids.numel()
    tiles = pairs if table is None else len(table)
    lanes = 1 if table is not None else triton.next_power_of_2(pairs)
    lines = pairs if order is None else order.numel()
    act = torch.empty(lines, inner, dtype=x.dtype, device=x.device)
    width = up.tile.rows // 2 if gated else up.tile.rows
    _up_kernel[(tiles * triton.cdiv(inner, width),)](
        x, up.operand, act, ids, order, table, pairs, x.stride(0), experts, up.k, inner,
        GATED=gated, SLOTS=ids.shape[1], SORTED=table is not None, LANES=lanes, FIELDS=FIELDS,
        **up.options(),
    )  # fmt: skip
    return act


def launch_few(
    x: Tensor, up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, ids: Tensor,
    weights: Tensor, shared: Tensor | None, gate: Tensor | None, tiles: Tiles, gated: bool = True,
) -> Tensor:  # fmt: skip
    """experts for few tokens, without a sort. gated: act is silu_mul."""
    tokens, slots = ids.shape
    hidden = up.shape[-1]
    inner = down.shape[-1]
    count = count_experts(up, down)
    target = target_of(x.device)
    tile = pipeline.up_tile(up, tokens, target) if pipeline.aligned(x) else None
    if tile is not None:
        act = pipeline.up(x, up, inner, count, ids, tile, target, gated)
    else:
        read = _reading(up, tiles.up, tiles.packed_up, x)
        act = _act(x, read, inner, count, ids, None, None, gated)
    of_shared = (shared, gate, _strides(shared, gate), _parts(shared))
    tile = pipeline.down_tile(down, slots, target) if pipeline.aligned(act) else None
    if tile is not None:
        return pipeline.down(act, down, hidden, count, ids, weights, *of_shared, tile, target)
    places = triton.next_power_of_2(slots)
    read = _reading(down, tiles.down, tiles.packed_down, x)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    _down_sum_kernel[(tokens, triton.cdiv(hidden, read.tile.rows // places))](
        act, read.operand, ids, weights, out, shared, gate, count, inner, hidden,
        *_strides(shared, gate), SLOTS=slots, PLACES=places, PARTS=_parts(shared),
        **read.options(tokens=places),
    )  # fmt: skip
    return out


def launch_sorted(
    x: Tensor, up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight, ids: Tensor,
    weights: Tensor, shared: Tensor | None, gate: Tensor | None, tiles: Tiles, gated: bool = True,
) -> Tensor:  # fmt: skip
    """experts for any number of tokens, sorted into tiles. gated: act is silu_mul."""
    tokens, slots = ids.shape
    hidden = up.shape[-1]
    inner = down.shape[-1]
    count = count_experts(up, down)
    pairs = ids.numel()
    unpack = pairs >= UNPACK_FROM * count
    order, table = sort_pairs(ids, count, tiles.up.tokens)
    read = _reading(up, tiles.up, tiles.packed_up, x, unpack)
    act = _act(x, read, inner, count, ids, order, table, gated)
    y = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    read = _reading(down, tiles.down, tiles.packed_down, x, unpack)
    tile = read.tile
    lines = TensorDescriptor.from_tensor(act, [tile.tokens, tile.k]) if tile.tma else act
    _down_kernel[(len(table) * triton.cdiv(hidden, tile.rows),)](
        lines, read.operand, y, order, table, pairs, count, inner, hidden, FIELDS,
        TMA=tile.tma, **read.options(),
    )  # fmt: skip
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    _sum_kernel[(tokens, triton.cdiv(hidden, COLUMNS))](
        y, weights, out, shared, gate, hidden, *_strides(shared, gate),
        SLOTS=slots, PARTS=_parts(shared), BLOCK=COLUMNS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _strides(shared: Tensor | None, gate: Tensor | None) -> tuple[int, int, int]:
    """From one token's to the next's, and from a partial of shared to the next; gate's."""
    of_shared = (0, 0) if shared is None else (shared.stride(-2), shared.stride(0))
    return (*of_shared, 0 if gate is None else gate.stride(0))


def _parts(shared: Tensor | None) -> int:
    """How many partials shared is."""
    return 1 if shared is None or shared.dim() < 3 else shared.shape[0]


def _supports(**traits: Any) -> str | None:
    count = traits.get("experts", 1)
    slots = traits.get("top_k", 1)
    if count > MOST_EXPERTS or slots > MOST_SLOTS:
        return f"{slots} of {count} experts are above {MOST_SLOTS} of {MOST_EXPERTS}"
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
) -> Tensor:
    """See lockstep.kernels.experts.experts.

    up, down, ids and weights are contiguous; the last strides of x and shared are 1.
    """
    if not ids.numel():
        return torch.empty_like(x)
    count = count_experts(up, down)
    few = are_few(*ids.shape, count, isinstance(down, QuantizedWeight))
    tiles = tiles_of(ids.numel(), count, x.dtype, few)
    launch = launch_few if few else launch_sorted
    gated = act == "silu_mul"
    return launch(x, up, down, ids, weights, shared, shared_gate, tiles, gated)
