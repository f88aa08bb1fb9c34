"""Triton kernels for training the delta rule: triangular inverse, and scan over chunk states."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _invert(a, x, C: tl.constexpr):
    """Write the inverse of I + a. Each CTA inverts one [C, C] matrix by forward substitution."""
    base = tl.program_id(0).to(tl.int64) * C * C
    r = tl.arange(0, C)
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, C):
        row = tl.load(a + base + i * C + r)
        new = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(r[:, None] == i, inverse - new[None, :], inverse)
    tl.store(x + base + r[:, None] * C + r[None, :], inverse)


@triton.jit
def _scan(
    a, b, out, heads, count: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, BACK: tl.constexpr
):
    """Write the state before each chunk; BACK runs from the last chunk with transposed matrices.

    Each CTA computes BV columns of one head's state.
    """
    row = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    r = tl.arange(0, D)
    c = tl.program_id(1) * BV + tl.arange(0, BV)
    state = tl.zeros((D, BV), tl.float32)
    for step in range(count):
        i = count - 1 - step if BACK else step
        base = ((row * count + i).to(tl.int64) * heads + head) * D * D
        here = base + r[:, None] * D + c[None, :]
        tl.store(out + here, state)
        if BACK:
            m = tl.load(a + base + r[None, :] * D + r[:, None])
        else:
            m = tl.load(a + base + r[:, None] * D + r[None, :])
        state = tl.dot(m, state, input_precision="tf32x3") + tl.load(b + here)


class Invert(torch.autograd.Function):
    """Inverse of I + a for a [..., C, C], strictly lower triangular, fp32."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        a = a.contiguous()
        x = torch.empty_like(a)
        _invert[(a.numel() // a.shape[-1] ** 2,)](a, x, a.shape[-1], num_warps=2)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT)


class Scan(torch.autograd.Function):
    """States before each chunk: s[c + 1] = a[c] s[c] + b[c], s[0] = 0; [B, N, H, D, D] fp32."""

    @staticmethod
    def _run(a: Tensor, b: Tensor, back: bool) -> Tensor:
        a = a.contiguous()
        b = b.contiguous()
        out = torch.empty_like(b)
        rows, count, heads, d = a.shape[:4]
        _scan[(rows * heads, d // 16)](a, b, out, heads, count, d, 16, back, num_warps=4)
        return out

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        before = Scan._run(a, b, False)
        ctx.save_for_backward(a, before)
        return before

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, before = ctx.saved_tensors
        after = Scan._run(a, grad, True)
        return after @ before.mT, after
