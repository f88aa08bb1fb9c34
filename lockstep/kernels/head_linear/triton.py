# mypy: ignore-errors
"""head_linear in Triton: a tile of one head's outputs per program, over all of K.

Weights are the left operand, so that wgmma serves any number of tokens; one accumulator takes K in
ascending order, and the tile changes no bit (docs/kernels/linear.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.head_linear import head_linear

BLOCK_N = 64
BLOCK_K = 64
MOST_TOKENS = 128
"""Tokens of a tile: sums of 64 x 128 are 64 registers in each thread of 4 warps."""
FP32_TOKENS = 16
"""Tokens of every tile in fp32, whose products run on the FMA units."""
WARPS = 4
STAGES = 2


@triton.jit(do_not_specialize=["tokens"])
def _head_linear_kernel(
    x, weight, out, tokens, x_token, x_head,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of a head for BLOCK_T tokens. weight [H, N, K] is contiguous."""
    head = tl.program_id(2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    weight += head * (N * K) + (n * K)[:, None] + k[None, :]
    x += head * x_head + (t.to(tl.int64) * x_token)[:, None] + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for at in range(0, K, BLOCK_K):
        inside = (at + k < K)[None, :]
        w = tl.load(weight + at, mask=(n < N)[:, None] & inside, other=0.0)
        a = tl.load(x + at, mask=(t < tokens)[:, None] & inside, other=0.0)
        total = tl.dot(w, a.T, total, input_precision="ieee")
    to = out + (t.to(tl.int64) * (H * N) + head * N)[None, :] + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (t < tokens)[None, :])


@head_linear.backend("triton", supports=gpu_trait)
def head_linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """See lockstep.kernels.head_linear.head_linear. weight is contiguous."""
    tokens, heads, inputs = x.shape
    outputs = weight.shape[1]
    out = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    if tokens:
        exact = x.dtype == torch.float32
        fitting = min(MOST_TOKENS, triton.next_power_of_2(max(tokens, 16)))
        block = FP32_TOKENS if exact else fitting
        grid = (triton.cdiv(tokens, block), triton.cdiv(outputs, BLOCK_N), heads)
        _head_linear_kernel[grid](
            x, weight, out, tokens, *x.stride()[:2], heads, outputs, inputs,
            BLOCK_N, block, BLOCK_K // 2 if exact else BLOCK_K,
            num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    return out
