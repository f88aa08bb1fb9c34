"""silu_mul and relu2; sigmoid, silu and softplus from exp, log1p and IEEE arithmetic.

On a CPU torch.sigmoid, silu and softplus use other code for the last elements of a tensor, past its
last whole vector. Those elements get other bits, so a row's bits would depend on the number of
rows. exp and log1p have no such tail (docs/decisions/0002-cpu-elementwise.md).
"""

from typing import Literal

import torch
from torch import Tensor

from lockstep.kernels.registry import op

SOFTPLUS_LINEAR = 20.0
"""Threshold above which softplus(x) is x in fp32, as in torch."""
ONE = torch.ones(())
"""The number 1 as a tensor: adding it to a small CPU tensor takes 1.3 us instead of 3.6."""


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) in fp32, rounded to x's dtype."""
    return torch.exp(-x.float()).add_(ONE).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Compute x / (1 + exp(-x)) in fp32, rounded to x's dtype."""
    wide = x.float()
    return (wide / torch.exp(-wide).add_(ONE)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) of fp32 x, and x itself above 20 as in torch."""
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


@op
def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of gate_up [T, 2I] = [gate | up] -> [T, I] in its dtype.

    Two roundings: silu to the dtype, then the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@op
def relu2(x: Tensor) -> Tensor:
    """Compute max(x, 0)^2 of x [T, I], rounded once to its dtype (So et al., Primer, 2021)."""
    positive = torch.relu(x.float())
    return (positive * positive).to(x.dtype)


Act = Literal["silu_mul", "relu2"]
ACTS = {"silu_mul": silu_mul, "relu2": relu2}
"""Activation ops of an MLP by name: silu_mul with a gate, relu2 without."""
