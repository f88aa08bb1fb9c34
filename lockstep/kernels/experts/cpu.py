"""experts on a CPU: tokens grouped by expert, in row tiles that give the reference's bits here.

It is fast where up and down are transposed views of [E, K, N] storage.
"""

import torch
from torch import Tensor

from lockstep.kernels.activations import ACTS, Act
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.exchange import Gather, all_columns
from lockstep.kernels.experts import combine, count_experts, expert_weight, experts
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized
from lockstep.kernels.row_tiles import tiled_linear


@experts.backend("cpu", supports=cpu_trait)
def experts_cpu(
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
    """See lockstep.kernels.experts.contract.experts."""
    tokens, slots = ids.shape
    number = count or count_experts(up, down)

    def multiply(x: Tensor, weight: Tensor | QuantizedWeight, expert: int) -> Tensor:
        return tiled_linear(x, dequantized(expert_weight(weight, expert, number), x.dtype))

    flat = ids.flatten().long().clamp(0, number - 1)
    order = flat.argsort(stable=True)
    sizes = torch.bincount(flat, minlength=number).tolist()
    chosen = [(e, pairs) for e, pairs in enumerate(order.split(sizes)) if len(pairs)]
    inner = [ACTS[act](multiply(x[pairs // slots], up, expert)) for expert, pairs in chosen]
    # One exchange for all experts; every rank has the same pairs in the same order.
    gathered = gather(torch.cat(inner)).split([len(pairs) for _, pairs in chosen]) if inner else ()
    y = x.new_empty(tokens * slots, expert_weight(down, 0, number).shape[0])
    for (expert, pairs), activations in zip(chosen, gathered, strict=True):
        y[pairs] = multiply(activations, down, expert)
    # Slot by slot: the order of the sum is part of the op.
    total = y.new_zeros(tokens, y.shape[1], dtype=torch.float32)
    for slot, slot_y in enumerate(y.view(tokens, slots, y.shape[1]).unbind(1)):
        total += weights[:, slot, None].float() * slot_y.float()
    return combine(total, shared, shared_gate, x.dtype)
