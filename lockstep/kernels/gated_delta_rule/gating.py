# mypy: ignore-errors
"""Gates of Gated DeltaNet in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import sigmoid_approx, softplus


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Raw a, b and a head's parameters -> g, the log decay, and beta, fp32."""
    rise = softplus(a.to(tl.float32) + dt_bias)
    return -tl.exp(a_log) * rise, sigmoid_approx(b.to(tl.float32))
