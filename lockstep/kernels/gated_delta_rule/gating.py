# mypy: ignore-errors
"""Gates of Gated DeltaNet in Triton."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import sigmoid_approx, softplus
from lockstep.kernels.device.reductions import pairwise_sum


@triton.jit
def load_gate(
    ptr, offsets, partial_stride, mask, DTYPE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Load raw a or b [T], or the tree sum of PARTS partials, rounded once to DTYPE as linear does.

    partial_stride: elements between partials. Lanes share the partials of a token: with all of them
    in one thread, intra_chunk_kernel spilled 416 bytes per thread instead of 136.
    """
    if PARTS == 1:
        return tl.load(ptr + offsets, mask=mask, other=0.0)
    else:
        parts = tl.arange(0, PARTS)[None, :] * partial_stride.to(tl.int64)
        x = tl.load(ptr + offsets[:, None] + parts, mask=mask[:, None], other=0.0)
        return pairwise_sum(x).to(DTYPE)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Compute the log decay g and the write strength beta in fp32 from raw a, b of one head."""
    dt = softplus(a.to(tl.float32) + dt_bias)
    return -tl.exp(a_log) * dt, sigmoid_approx(b.to(tl.float32))
