# mypy: ignore-errors
"""Loads of one-byte values as 32-bit words, four values each, in Triton."""

import triton
import triton.language as tl


@triton.jit
def load_words(qdata, scales, columns, live, D: tl.constexpr):
    """Load words of four bytes (values_per_load 4). See KVDeviceFunctions."""
    words = qdata.to(tl.pointer_type(tl.int32), bitcast=True)
    # Two words, not four, per lane: the 8 values that a lane dequantizes then sit next to those of
    # its neighbour in shared memory.
    word_ptrs = tl.max_contiguous(words + columns, (1, 2))
    return (tl.load(word_ptrs, mask=live & (columns < D // 4), other=0),)


@triton.jit
def load_words_and_scales(qdata, scales, columns, live, D: tl.constexpr):
    """Load words of four bytes and the scale of each token. See KVDeviceFunctions."""
    return load_words(qdata, scales, columns, live, D) + (tl.load(scales, mask=live, other=0.0),)


@triton.jit
def interleave(v0, v1, v2, v3):
    """Interleave the four values of each word [T, W] into [T, 4 W], in memory order."""
    joined = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return tl.reshape(joined, (joined.shape[0], joined.shape[1] * 4))
