# mypy: ignore-errors
"""What the Triton kernels of both laws share: channels of heads, gates, what they serve."""

from typing import Any

import triton
import triton.language as tl

from lockstep.kernels.activations._device import sigmoid_approx, softplus
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.recurrent._walk_triton import WIDEST


@triton.jit
def head_channels(unit, lanes, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Channels of head `unit` of [all q | all k | all v] at lanes, and which lanes it has."""
    is_value = unit >= 2 * HK
    first = tl.where(is_value, 2 * HK * K + (unit - 2 * HK) * V, unit * K)
    return first + lanes, lanes < tl.where(is_value, V, K)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Raw a, b and a head's parameters -> g, the log decay, and beta, fp32."""
    rise = softplus(a.to(tl.float32) + dt_bias)
    return -tl.exp(a_log) * rise, sigmoid_approx(b.to(tl.float32))


def supports(**traits: Any) -> str | None:
    """None where these kernels serve a layer of these traits, else the reason why not."""
    for name in ("key_dim", "value_dim"):
        if not 1 <= traits.get(name, WIDEST) <= WIDEST:
            return f"{name} {traits[name]} is not in 1 .. {WIDEST}"
    return gpu_trait(**traits)
