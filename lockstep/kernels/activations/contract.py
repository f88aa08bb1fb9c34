"""silu_mul and relu2; and sigmoid, silu and softplus out of exp, log1p and IEEE arithmetic.

torch.sigmoid, silu and softplus on a CPU give the last elements of a tensor (those past its last
whole vector) other bits than the same numbers elsewhere, so a row's bits would depend on how many
rows there are. exp and log1p do not (docs/decisions/0002-cpu-elementwise.md).
"""

from typing import Literal

import torch
from torch import Tensor

from lockstep.kernels.registry import op

SOFTPLUS_LINEAR = 20.0
"""Above it softplus(x) is x to fp32, as torch has it."""
ONE = torch.ones(())
"""A tensor, not a number: on a CPU adding it to a small tensor takes 1.3 us instead of 3.6."""


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed in fp32, of x's dtype."""
    return torch.exp(-x.float()).add_(ONE).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), computed in fp32, of x's dtype."""
    wide = x.float()
    return (wide / torch.exp(-wide).add_(ONE)).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of fp32 x, and x itself above 20 as in torch."""
    return torch.where(x > SOFTPLUS_LINEAR, x, torch.log1p(torch.exp(x)))


@op
def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], all of gate then all of up -> silu(gate) * up [T, I] of its dtype.

    Rounded twice: silu to the dtype, then the product.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@op
def relu2(x: Tensor) -> Tensor:
    """x [T, I] -> max(x, 0)^2 [T, I] of its dtype, rounded once (So et al., Primer, 2021)."""
    positive = torch.relu(x.float())
    return (positive * positive).to(x.dtype)


Act = Literal["silu_mul", "relu2"]
ACTS = {"silu_mul": silu_mul, "relu2": relu2}
"""What stands between an MLP's products: a gate and what it multiplies, or neither."""
