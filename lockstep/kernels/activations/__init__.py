"""silu_mul and relu2; and sigmoid, silu and softplus out of exp, log1p and IEEE arithmetic.

torch.sigmoid, silu and softplus on a CPU give the last elements of a tensor (those past its last
whole vector) other bits than the same numbers elsewhere, so a row's bits would depend on how many
rows there are. exp and log1p do not (docs/decisions/0002-cpu-elementwise.md).
"""

from lockstep.kernels.activations.contract import (
    ACTS,
    ONE,
    SOFTPLUS_LINEAR,
    Act,
    relu2,
    sigmoid,
    silu,
    silu_mul,
    softplus,
)

__all__ = [
    "ACTS",
    "Act",
    "ONE",
    "SOFTPLUS_LINEAR",
    "relu2",
    "sigmoid",
    "silu",
    "silu_mul",
    "softplus",
]
