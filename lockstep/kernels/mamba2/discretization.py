# mypy: ignore-errors
"""Time steps of Mamba-2 in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import softplus


@triton.jit
def time_steps(dt, a_log, dt_bias, shortest, longest):
    """Raw dt and a head's parameters -> the time step and g, the log decay, fp32."""
    step = softplus(dt.to(tl.float32) + dt_bias)
    step = tl.minimum(tl.maximum(step, shortest), longest)
    return step, step * -tl.exp(a_log)
