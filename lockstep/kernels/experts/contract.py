"""experts: the MLPs of a mixture, each token through the few that it was sent to."""

import torch
from torch import Tensor

from lockstep.kernels.activations import ACTS, Act, sigmoid
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized
from lockstep.kernels.registry import op
from lockstep.kernels.route import sum_partials
from lockstep.kernels.row_tiles import tile_mm


@op
def experts(
    x: Tensor,
    up: Tensor | QuantizedWeight,
    down: Tensor | QuantizedWeight,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    act: Act = "silu_mul",
) -> Tensor:
    """x [T, H], up [E, 2I, H] (rows 0 .. I-1 gate, I .. 2I-1 up), down [E, H, I], ids [T, k] int32,
    weights [T, k] fp32 or x's dtype, shared [T, H], shared_gate [T] -> y [T, H] of x's dtype.

    A packed up is one weight [E * 2I, H], a packed down one [E * H, I], expert by expert. Each is
    what it unpacks to: experts(x, packed) == experts(x, packed.dequantize(x.dtype)), bit for bit.

    Per token and chosen expert, numbers in brackets rounded to x's dtype:

        [g], [u]  = x up_e^T         linear with one segment: one ascending fp32 chain over K
        [a]       = [silu(g)] * u    silu_mul
        [y_e]     = a down_e^T       linear with one segment

    With act relu2 there is no gate: up is [E, I, H], packed [E * I, H], and

        [u]       = x up_e^T
        [a]       = max(u, 0)^2      relu2

    y = 0 + w_0 y_0 + w_1 y_1 + ... in fp32, slots of `ids` in ascending order, products rounded to
    fp32 before they are added; the shared expert's output last; rounded once. With shared_gate it
    counts as [sigmoid(shared_gate)] * shared, rounded. shared may be partials [P, T, H] fp32 of a
    linear instead, P 2 or more: their tree_sum is meant, rounded.

    ids out of range count as the nearest expert: rows that nobody reads may hold anything, and what
    is NaN in a row stays in it. A row's bits depend on that row alone.
    """
    tokens, slots = ids.shape
    count = count_experts(up, down)
    total = torch.zeros_like(x, dtype=torch.float32)
    for token in range(tokens):
        for slot in range(slots):
            expert = int(ids[token, slot].clamp(0, count - 1))
            inner = ACTS[act](_multiply(x[token : token + 1], expert_weight(up, expert, count)))
            y = _multiply(inner, expert_weight(down, expert, count))[0]
            total[token] += weights[token, slot].float() * y.float()
    return add_shared_expert(total, shared, shared_gate, x.dtype)


def _multiply(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """Multiply x [T, K] with one expert's weight [N, K] in one fp32 chain over K, rounded."""
    plain = dequantized(weight, x.dtype)
    return tile_mm(x.float(), plain.float().t()).to(plain.dtype)


def count_experts(up: Tensor | QuantizedWeight, down: Tensor | QuantizedWeight) -> int:
    """E. A packed down has H rows of each expert, and up has H columns."""
    return down.shape[0] // up.shape[-1] if isinstance(down, QuantizedWeight) else down.shape[0]


def expert_weight(
    weight: Tensor | QuantizedWeight, expert: int, count: int
) -> Tensor | QuantizedWeight:
    """The weight [N, K] of one of `count` experts, as it lies."""
    if isinstance(weight, Tensor):
        return weight[expert]
    rows = weight.shape[0] // count
    return weight.rows(expert * rows, (expert + 1) * rows)


def add_shared_expert(
    total: Tensor, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """total [T, H] fp32 + what the shared expert gives, rounded."""
    if shared is not None:
        shared = sum_partials(shared, dtype)
    if shared is not None and gate is not None:
        shared = sigmoid(gate)[:, None] * shared
    return (total if shared is None else total + shared.float()).to(dtype)
