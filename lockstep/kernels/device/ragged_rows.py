# mypy: ignore-errors
"""Lookup of a row of a ragged batch, in Triton. Gluon kernels call it, too."""

import triton
import triton.language as tl


@triton.jit
def row_of(cu_seqlens, starts, s):
    """Return a row's first token, its token count, and the number of tokens cached before it.

    cu_seqlens: pointer to the rows' first tokens. starts: pointer to the rows' cached tokens. s:
    row.
    """
    first = tl.load(cu_seqlens + s).to(tl.int64)
    count = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    return first, count, tl.load(starts + s).to(tl.int32)
