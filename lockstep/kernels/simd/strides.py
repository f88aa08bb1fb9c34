"""Addresses and layouts of tensors, for kernels that are called with numbers alone."""

from math import prod

import torch
from torch import Tensor


def address(x: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a contiguous tensor, whose dtype the kernel assumes."""
    # A kernel would read other numbers, and write out of bounds.
    assert x.dtype == dtype and x.is_contiguous(), (x.dtype, x.stride())
    return x.data_ptr()


def address_of_rows(x: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return (address, elements between rows) of x [R, C], which may be columns of a wider tensor.

    dtype: that the kernel assumes.
    """
    assert x.dtype == dtype and x.stride(1) == 1, (x.dtype, x.stride())
    return x.data_ptr(), x.stride(0)


def row_strides(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """Return x [..., D], copied unless its rows are regular, and where its rows are.

    Returns (x, rows, inner, outer stride, stride): row r begins at element
    r // inner * outer stride + r % inner * stride. inner is at least 1.
    """
    if x.is_contiguous():
        width = x.shape[-1]
        return x, x.numel() // max(1, width), 1, width, 0
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[0] * x.shape[1], max(1, x.shape[1]), x.stride(0), x.stride(1)
    return row_strides(x.contiguous())


def token_stride(x: Tensor) -> tuple[Tensor, int]:
    """Return x [S, Q, C] or [S, Q, H, D] and the elements from one token to the next.

    x is copied unless its tokens are regular.
    """
    rows, window, *sizes = x.shape
    outer, stride, *inner = x.stride()
    if window == 1:
        stride = outer
    if (rows > 1 and outer != window * stride) or inner != [*sizes[1:], 1]:
        return x.contiguous(), prod(sizes)
    return x, stride
