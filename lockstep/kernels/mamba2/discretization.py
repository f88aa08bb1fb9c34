# mypy: ignore-errors
"""Discretization of Mamba-2 in Triton: time steps and decays."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import softplus


@triton.jit
def discretize(dt, a_log, dt_bias, dt_min, dt_max):
    """Compute the time step and the log decay g of one head in fp32 from raw dt.

    dt_min, dt_max: limits of the time step.
    """
    dt = softplus(dt.to(tl.float32) + dt_bias)
    dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
    return dt, dt * -tl.exp(a_log)
