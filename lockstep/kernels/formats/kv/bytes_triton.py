# mypy: ignore-errors
"""Codes of one byte, read by words of four, in Triton."""

import triton
import triton.language as tl


@triton.jit
def fetch_words(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice, share 4. A lane takes two words: what neighbours unpack lies side by side."""
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    at = tl.max_contiguous(words + columns, (1, 2))
    return (tl.load(at, mask=live & (columns < D // 4), other=0),)


@triton.jit
def fetch_scaled(codes, numbers, columns, live, D: tl.constexpr):
    """fetch_words, and the scale of each token."""
    return fetch_words(codes, numbers, columns, live, D) + (tl.load(numbers, mask=live, other=0.0),)


@triton.jit
def in_order(v0, v1, v2, v3):
    """The four of each word [T, W] -> [T, 4 W]."""
    four = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return tl.reshape(four, (four.shape[0], four.shape[1] * 4))
