"""Layout of a tensor's rows in memory, for kernels that address it by numbers."""

from math import prod

from torch import Tensor


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
