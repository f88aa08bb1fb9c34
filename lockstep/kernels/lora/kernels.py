# mypy: ignore-errors
"""lora in Triton: h = A x, then y + s B h. A CTA works for one token, so no other token can change
its bits.

Sums over K and over the rank run in blocks of a fixed size, in ascending order; each block is added
to the accumulator element by element, and the accumulator's columns are added once, at the end.
Rows of zeros after an adapter's rank therefore change no bit.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start


@triton.jit(do_not_specialize=["x_stride"])
def lora_shrink_kernel(
    x_ptr, a_ptr, scales_ptr, adapter_ids_ptr, hidden_ptr, x_stride,
    P: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_R values of h [T, P R] fp32 of one part for one token.

    They are left unwritten where the token's adapter has scale 0 in this part.
    """
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    adapter = tl.load(adapter_ids_ptr + token).to(tl.int64)
    if tl.load(scales_ptr + adapter * P + part) != 0.0:
        rows = part * R + tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + (adapter * (P * R) + rows)[:, None] * K + k[None, :]
        x_ptrs = x_ptr + token * x_stride + k
        acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for begin in range(0, K, BLOCK_K):
            inside = begin + k < K
            x_tile = tl.load(x_ptrs + begin, mask=inside, other=0.0).to(tl.float32)
            a_tile = tl.load(a_ptrs + begin, mask=inside[None, :], other=0.0).to(tl.float32)
            acc += a_tile * x_tile[None, :]
        tl.store(hidden_ptr + token * (P * R) + rows, tl.sum(acc, 1))


@triton.jit
def lora_expand_kernel(
    y_ptr, hidden_ptr, b_ptr, scales_ptr, parts_ptr, adapter_ids_ptr,
    P: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add s B h to BLOCK_N columns of one token of y [T, N]."""
    pdl_start()
    token = tl.program_id(0).to(tl.int64)
    adapter = tl.load(adapter_ids_ptr + token).to(tl.int64)
    # Tokens of the base model read neither B nor y.
    if adapter != 0:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        part = tl.load(parts_ptr + n, mask=n < N, other=0)
        scale = tl.load(scales_ptr + adapter * P + part)
        changes = (n < N) & (scale != 0.0)
        b_ptrs = b_ptr + (adapter * R + r)[:, None] * N + n[None, :]
        hidden_ptrs = hidden_ptr + token * (P * R) + part[None, :] * R + r[:, None]
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for begin in range(0, R, BLOCK_R):
            b_tile = tl.load(b_ptrs + begin * N, mask=changes[None, :], other=0.0)
            # Columns of one part read the same address: the load is a broadcast.
            h_tile = tl.load(hidden_ptrs + begin, mask=changes[None, :], other=0.0)
            acc += b_tile.to(tl.float32) * h_tile
        delta = tl.sum(acc, 0)
        y_ptrs = y_ptr + token * N + n
        base = tl.load(y_ptrs, mask=changes, other=0.0).to(tl.float32)
        tl.store(y_ptrs, (base + scale * delta).to(y_ptr.dtype.element_ty), mask=changes)
