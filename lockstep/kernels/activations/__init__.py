"""Activations: silu_mul, relu2, and the functions sigmoid, silu and softplus."""

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
