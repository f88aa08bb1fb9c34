# mypy: ignore-errors
"""What the Triton kernels of both laws share: time steps, and what they serve."""

from typing import Any

import triton
import triton.language as tl

from lockstep.kernels.activations._device import softplus
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.recurrent._walk_triton import WIDEST


@triton.jit
def time_steps(dt, a_log, dt_bias, shortest, longest):
    """Raw dt and a head's parameters -> the time step and g, the log decay, fp32."""
    step = softplus(dt.to(tl.float32) + dt_bias)
    step = tl.minimum(tl.maximum(step, shortest), longest)
    return step, step * -tl.exp(a_log)


def supports(**traits: Any) -> str | None:
    """None where these kernels serve a layer of these traits, else the reason why not."""
    for name in ("state_dim", "head_dim"):
        if not 1 <= traits.get(name, WIDEST) <= WIDEST:
            return f"{name} {traits[name]} is not in 1 .. {WIDEST}"
    return gpu_trait(**traits)
