# mypy: ignore-errors
"""Where a row of a ragged batch stands, in Triton, and in Gluon, which calls it too."""

import triton
import triton.language as tl


@triton.jit
def row_of(cu_seqlens, starts, s):
    """Row s: the place of its first token, its tokens, the tokens before them."""
    first = tl.load(cu_seqlens + s).to(tl.int64)
    count = (tl.load(cu_seqlens + s + 1) - first).to(tl.int32)
    return first, count, tl.load(starts + s).to(tl.int32)
