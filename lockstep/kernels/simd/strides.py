"""Addresses and layouts of tensors, for kernels that are called with numbers alone.

Such a kernel knows neither dtypes nor bounds. It would read wrong numbers where a tensor has
another dtype, and read and write past its end where it has fewer elements. So every tensor that a
caller has made is checked before its address is passed on. Page numbers, slots and other indices
that a tensor contains are not checked.
"""

from math import prod

import torch
from torch import Tensor


def check_operand(name: str, x: Tensor, dtype: torch.dtype, size: int) -> None:
    """Raise ValueError unless x is a CPU's tensor of `size` elements of a dtype."""
    if x.dtype != dtype or x.numel() != size or not x.is_cpu:
        raise _operand_error(name, x, f"{size} elements of {dtype} on a CPU")


def address(name: str, x: Tensor, dtype: torch.dtype, size: int) -> int:
    """Return the address of a contiguous tensor of `size` elements.

    Raises:
        ValueError: x has another dtype, number of elements or layout, or is not on a CPU.
    """
    # One condition and no call of check_operand: kernels have up to 20 operands at 0.3 us each.
    if x.dtype != dtype or x.numel() != size or not x.is_contiguous() or not x.is_cpu:
        raise _operand_error(name, x, f"{size} contiguous elements of {dtype} on a CPU")
    return x.data_ptr()


def optional_address(name: str, x: Tensor | None, dtype: torch.dtype, size: int) -> int:
    """Return address(...), or 0 of None, which kernels take for a missing operand."""
    return 0 if x is None else address(name, x, dtype, size)


def address_of_rows(
    name: str, x: Tensor, dtype: torch.dtype, rows: int, columns: int
) -> tuple[int, int]:
    """Return (address, elements between rows) of x [rows, columns].

    x may be columns of a wider tensor.

    Raises:
        ValueError: x has another dtype, shape or layout, or is not on a CPU.
    """
    if x.dtype != dtype or x.shape != (rows, columns) or not x.is_cpu:
        raise _operand_error(name, x, f"[{rows}, {columns}] of {dtype} on a CPU")
    outer, inner = x.stride()
    # The stride of one column is meaningless, and torch may report any.
    if inner != 1 and columns > 1:
        raise _operand_error(name, x, "rows of consecutive elements")
    return x.data_ptr(), outer


def _operand_error(name: str, x: Tensor, expected: str) -> ValueError:
    shape, strides = list(x.shape), x.stride()
    actual = f"{shape} of {x.dtype} on {x.device} with strides {strides}"
    return ValueError(f"{name}: the kernel reads {expected}; the tensor is {actual}")


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
