# mypy: ignore-errors
"""Gates of Gated DeltaNet in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import sigmoid_approx, softplus


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Compute the log decay g and the write strength beta in fp32 from raw a, b of one head."""
    dt = softplus(a.to(tl.float32) + dt_bias)
    return -tl.exp(a_log) * dt, sigmoid_approx(b.to(tl.float32))
