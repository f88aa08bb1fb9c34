"""linear in Triton: one fp32 accumulator per output, K ascending; tiles are chosen by T alone.

On Hopper every tile shape gives the same bits in bf16 and fp16, mma.sync and wgmma alike; in fp32
the products run on the FMA units, with one tile for all T.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.linear import linear

GROUP = 8


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x, weight, out, tokens, x_stride, w_stride,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out [tokens, N]. Programs walk GROUP row tiles per column tile, for the cache."""
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    inside = pid % (GROUP * tiles_n)
    m = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = inside // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x += m.to(tl.int64)[:, None] * x_stride
    weight += n.to(tl.int64)[None, :] * w_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, K, BLOCK_K):
        row, live = at + k, at + k < K
        a = tl.load(x + row[None, :], mask=(m < tokens)[:, None] & live[None, :], other=0.0)
        b = tl.load(weight + row[:, None], mask=(n < N)[None, :] & live[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    out += m.to(tl.int64)[:, None] * N + n[None, :]
    mask = (m < tokens)[:, None] & (n < N)[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


def _tile(tokens: int, n: int, dtype: torch.dtype) -> tuple[tuple[int, int, int], int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K), warps, stages."""
    if dtype == torch.float32:
        return (32, 64, 32), 4, 2
    if tokens <= 16:
        return (16, 64 if n >= 8192 else 32, 128), 4, 4
    if tokens <= 64:
        return (64, 64, 64), 4, 4
    return (128, 128, 64), 8, 3


def _supports(**traits: Any) -> str | None:
    return gpu_trait(**traits)


@linear.backend("triton", supports=_supports)
def linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """See lockstep.kernels.linear.linear. Last strides must be 1."""
    tokens, k = x.shape
    n = weight.shape[0]
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    (block_m, block_n, block_k), warps, stages = _tile(tokens, n, x.dtype)
    grid = (triton.cdiv(tokens, block_m) * triton.cdiv(n, block_n),)
    if tokens:
        _linear_kernel[grid](
            x, weight, out, tokens, x.stride(0), weight.stride(0), n, k, GROUP,
            block_m, block_n, block_k,
            num_warps=warps, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out
