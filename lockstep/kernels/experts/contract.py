"""experts: the grouped MLPs of a mixture of experts, each token through its top-k experts.

The op is dispatch (tokens to experts), grouped_mlp (up, activation, down) and combine (the weighted
sum, the shared expert last). The functions below are its reference; a GPU backend fuses them into
as few launches as it can.
"""

import torch
from torch import Tensor

from lockstep.kernels.activations import ACTS, Act, sigmoid
from lockstep.kernels.exchange import Gather, all_columns
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized, sum_partials
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tile_mm


@op(needed_for="experts")
def experts(
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
    """Return the weighted sum of each token's experts, and the shared expert: y [T, H].

    Per token and chosen expert, numbers in brackets rounded to x's dtype:

        [g], [u]  = x up_e^T         linear with one partition: one ascending fp32 chain over K
        [a]       = [silu(g)] * u    silu_mul
        [y_e]     = a down_e^T       linear with one partition

    With act relu2 there is no gate:

        [u]       = x up_e^T
        [a]       = max(u, 0)^2      relu2

    y = 0 + w_0 y_0 + w_1 y_1 + ... in fp32, slots of `ids` in ascending order, products rounded to
    fp32 before they are added; the shared expert's output last; rounded once. With shared_gate the
    shared expert adds [sigmoid(shared_gate)] * shared, rounded. A row's bits depend on that row
    alone; what is NaN in a row stays in it.

    A quantized weight is used by its values: experts(x, w) ==
    experts(x, w.dequantize(x.dtype)), bit for bit.

    Args:
        x: [T, H].
        up: [E, 2I, H], rows 0 .. I-1 the gate and I .. 2I-1 up; [E, I, H] with relu2. A quantized
            one is one weight of E * 2I (or E * I) rows, expert by expert.
        down: [E, H, I]; a quantized one is one weight of E * H rows.
        ids: [T, k] int32. Ids out of range count as the nearest expert, since padding rows
            are undefined.
        weights: [T, k] fp32 or x's dtype.
        shared: [T, H], output of the shared expert; or the partials [P, T, H] fp32 of its linear,
            P 2 or more, whose rounded tree_sum is the output.
        shared_gate: [T], gate logit of the shared expert.
        count: E; None to take it from the shapes, which works for weights of a single rank.
        gather: exchange of the activations' columns. With several ranks, up and down have the
            columns of this rank (I of a whole, H of y and of shared), and x and down's rows have
            all.
    """
    count = count or count_experts(up, down)
    columns = expert_weight(down, 0, count).shape[0]
    total = x.new_zeros(len(x), columns, dtype=torch.float32)
    for token, slot, expert in dispatch(ids, count):
        row = x[token : token + 1]
        y = grouped_mlp(row, up, down, expert, count, act, gather)[0]
        total[token] += weights[token, slot].float() * y.float()
    return combine(total, shared, shared_gate, x.dtype)


def dispatch(ids: Tensor, count: int) -> list[tuple[int, int, int]]:
    """Return (token, slot, expert) of every pair of ids [T, k], in order."""
    clamped = ids.clamp(0, count - 1).tolist()
    return [(t, s, expert) for t, row in enumerate(clamped) for s, expert in enumerate(row)]


def grouped_mlp(
    x: Tensor,
    up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    expert: int,
    count: int,
    act: Act,
    gather: Gather = all_columns,
) -> Tensor:
    """Return the MLP of one of `count` experts for its tokens x [T, H]: [T, H]."""
    inner = gather(ACTS[act](_multiply(x, expert_weight(up, expert, count))))
    return _multiply(inner, expert_weight(down, expert, count))


def _multiply(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """Multiply x [T, K] by one expert's weight [N, K] in one fp32 chain over K, rounded once."""
    dense = dequantized(weight, x.dtype)
    return tile_mm(x.float(), dense.float().t()).to(dense.dtype)


def combine(
    total: Tensor, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Add the shared expert's output to total [T, H] fp32 and round to dtype."""
    if shared is not None:
        shared = sum_partials(shared, dtype)
    if shared is not None and gate is not None:
        shared = sigmoid(gate)[:, None] * shared
    return (total if shared is None else total + shared.float()).to(dtype)


def count_experts(up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight) -> int:
    """Return E. A quantized down has H rows per expert, and up has H columns."""
    return down.shape[0] // up.shape[-1] if isinstance(down, QuantizedWeight) else down.shape[0]


def expert_weight(
    weight: Tensor | QuantizedWeight, expert: int, count: int
) -> Tensor | QuantizedWeight:
    """Return the weight [N, K] of one of `count` experts, as a view."""
    if isinstance(weight, Tensor):
        return weight[expert]
    rows = weight.shape[0] // count
    return weight.rows(expert * rows, (expert + 1) * rows)
