"""rms_norm, add_rms_norm, gated_rms_norm and gated_group_norm.

Each has one reduction tree per row width, whatever the batch.
"""

import torch
from torch import Tensor

from lockstep.kernels.activations import silu
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.registry import op


def _normalize(x: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) over the last dimension in fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute x / rms(x) * (offset + weight) in fp32, rounded once to x's dtype.

    x [..., D], weight [D]. offset: 1.0 for the zero-centred norms of Qwen3-Next and Qwen3.5, whose
    checkpoints store weights around 0; 0.0 for plain norms.
    """
    scale = offset + weight.float() if offset else weight.float()
    return (_normalize(x, eps) * scale).to(x.dtype)


@op
def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add x and delta [..., D] of one dtype, and norm the rounded sum. Returns sum and norm.

    The roundings are those of an addition followed by rms_norm. delta may also be the split-K
    partials [P, ..., D] fp32 of a linear; their tree_sum is rounded to x's dtype first.
    """
    if delta.dim() > x.dim():
        delta = tree_sum(delta).to(x.dtype)
    total = x + delta
    return total, rms_norm(total, weight, eps, offset)


@op(needed_for="Gated DeltaNet layers")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight * silu(gate) in fp32, rounded once to gate's dtype.

    x [..., D] fp32, gate [..., D], weight [D]. The norm comes before the gate (Gated DeltaNet).
    """
    return (_normalize(x, eps) * weight.float() * silu(gate.float())).to(gate.dtype)


@op(needed_for="Mamba-2 layers")
def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute y / rms(y) * weight with y = x * silu(gate) in fp32, rounded once to gate's dtype.

    x [..., G, D] fp32, gate [..., G, D], weight [G, D]. The gate comes before the norm, and each of
    the G groups has a separate norm (Mamba-2).
    """
    y = x * silu(gate.float())
    return (_normalize(y, eps) * weight.float()).to(gate.dtype)
