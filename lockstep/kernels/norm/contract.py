"""rms_norm, add_rms_norm, gated_rms_norm, gated_group_norm: one tree a width, any batch."""

import torch
from torch import Tensor

from lockstep.kernels.activations import silu
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.registry import op


def _normalise(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., D], weight [D] -> [..., D] of x's dtype: x / rms(x) * (offset + weight) in fp32.

    `offset` is 1.0 for the zero-centred norms of Qwen3-Next and Qwen3.5 (models: Qwen3.5
    checkpoints store weights around 0), 0.0 for plain ones. Rounded once.
    """
    scale = offset + weight.float() if offset else weight.float()
    return (_normalise(x, eps) * scale).to(x.dtype)


@op
def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """x, delta [..., D] of one dtype -> x + delta rounded to that dtype, and its rms_norm.

    The same roundings as the steps apart: the norm reads the rounded sum. delta may also be the
    partials [P, ..., D] fp32 of a linear, whose tree_sum is rounded to x's dtype first.
    """
    if delta.dim() > x.dim():
        delta = tree_sum(delta).to(x.dtype)
    total = x + delta
    return total, rms_norm(total, weight, eps, offset)


@op
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] fp32, gate [..., D], weight [D] -> [..., D] of gate's dtype.

    x / rms(x) * weight * silu(gate), all in fp32, norm before gate (Gated DeltaNet).
    """
    return (_normalise(x, eps) * weight.float() * silu(gate.float())).to(gate.dtype)


@op
def gated_group_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., G, D] fp32, gate [..., G, D], weight [G, D] -> [..., G, D] of gate's dtype.

    y / rms(y) * weight with y = x * silu(gate), all in fp32: gate before norm, and each of G groups
    normed by itself (Mamba-2).
    """
    y = x * silu(gate.float())
    return (_normalise(y, eps) * weight.float()).to(gate.dtype)
