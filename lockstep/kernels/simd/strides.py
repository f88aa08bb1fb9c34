"""Layout of a tensor's rows in memory, for kernels that address it by numbers."""

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
    """Return x [S, Q, ...] and the elements from one token to the next, copied unless regular."""
    tokens = x.flatten(0, 1)
    if len(tokens) and not tokens[0].is_contiguous():
        tokens = tokens.contiguous()
    return tokens, tokens.stride(0)
