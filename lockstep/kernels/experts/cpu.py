"""experts on a CPU: by expert, its tokens together in row tiles that give the reference's bits.

It is fast where up and down are transposed views of [E, K, N] storage.
"""

import torch
from torch import Tensor

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.experts import experts, with_shared
from lockstep.kernels.linear.cpu import linear_cpu


@experts.backend("cpu", supports=cpu_trait)
def experts_cpu(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.experts.experts."""
    tokens, slots = ids.shape
    flat = ids.flatten().long().clamp(0, up.shape[0] - 1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=up.shape[0]).tolist()
    y = x.new_empty(tokens * slots, x.shape[1])
    begin = 0
    for expert, count in enumerate(counts):
        pairs = order[begin : begin + count]
        begin += count
        if count:
            act = silu_mul(linear_cpu(x[pairs // slots], up[expert]))
            y[pairs] = linear_cpu(act, down[expert])
    total = torch.zeros_like(x, dtype=torch.float32)
    for slot, own in enumerate(y.view(tokens, slots, x.shape[1]).unbind(1)):
        total += weights[:, slot, None].float() * own.float()
    return with_shared(total, shared, shared_gate, x.dtype)
