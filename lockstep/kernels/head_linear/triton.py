# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""head_linear in Triton: one CTA per tile of one head's outputs, over all of K.

The weight is the left operand, so that wgmma serves any number of tokens; one accumulator takes K
in ascending order, and the tile changes no bit (docs/kernels/linear.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.integers import ceil_div, next_power_of_2

BLOCK_N = 64
"""Outputs of a tile."""
BLOCK_K = 64
"""Columns of an iteration, in 16-bit dtypes; half as many in fp32."""
MAX_TOKENS = 128
"""Maximum tokens of a tile: accumulators of 64 x 128 are 64 registers per thread with 4 warps."""
FP32_TOKENS = 16
"""Tokens of every tile in fp32, whose products run on FMA units."""
WARPS = 4
STAGES = 2


@triton.jit(do_not_specialize=["tokens"])
def _head_linear_kernel(
    x_ptr, weight_ptr, out_ptr, tokens, x_token_stride, x_head_stride,
    H: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N outputs of a head for BLOCK_T tokens. weight [H, N, K] is contiguous."""
    pdl_start()
    head = tl.program_id(2)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    weight_ptr += head * (N * K) + (n * K)[:, None] + k[None, :]
    x_ptr += head * x_head_stride + (t.to(tl.int64) * x_token_stride)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for begin in range(0, K, BLOCK_K):
        inside = (begin + k < K)[None, :]
        w_tile = tl.load(weight_ptr + begin, mask=(n < N)[:, None] & inside, other=0.0)
        x_tile = tl.load(x_ptr + begin, mask=(t < tokens)[:, None] & inside, other=0.0)
        # "ieee": in fp32 tf32 would round the operands.
        acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    ptrs = out_ptr + (t.to(tl.int64) * (H * N) + head * N)[None, :] + n[:, None]
    mask = (n < N)[:, None] & (t < tokens)[None, :]
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@head_linear.backend("triton", supports=gpu_trait)
def head_linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """See lockstep.kernels.head_linear.contract.head_linear. weight is contiguous."""
    tokens, heads, inputs = x.shape
    outputs = weight.shape[1]
    out = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    if tokens:
        fp32 = x.dtype == torch.float32
        max_block = min(MAX_TOKENS, next_power_of_2(max(tokens, 16)))
        block = FP32_TOKENS if fp32 else max_block
        grid = (ceil_div(tokens, block), ceil_div(outputs, BLOCK_N), heads)
        _head_linear_kernel[grid](
            x, weight, out, tokens, *x.stride()[:2], heads, outputs, inputs,
            BLOCK_N, block, BLOCK_K // 2 if fp32 else BLOCK_K,
            num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
        )  # fmt: skip
    return out
