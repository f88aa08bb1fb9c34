# mypy: ignore-errors
"""Causal depthwise convolution of recurrent layers in Triton, with SiLU.

Tokens before the step come from a circular history buffer of raw inputs.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.history import wrap_index


@triton.jit
def convolve_window(
    mixed_ptr, conv_history_ptr, conv_weight_ptr, first, width, begin, conv_index, length, conv_len,
    stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, bias_ptr,
):  # fmt: skip
    """Convolve channels first .. first + width - 1 of TOKENS tokens of a generated window.

    mixed_ptr: first token of the window, tokens `stride` apart. begin: first token to convolve.
    conv_history_ptr: the row's history [conv_len, C] of raw inputs; the window begins at conv_index
    in it. conv_weight_ptr [R + 1, C]. bias_ptr [C] or None.

    Returns two tuples of tiles [1, BLOCK]: per token the SiLU of its convolution in fp32, and the
    raw inputs of the R tokens before `begin` and of the TOKENS tokens.
    """
    offs = tl.arange(0, BLOCK)[None, :]
    channel_mask = offs < width
    channel = first + offs
    # A tuple of one tile per token instead of a 2-D tile: each raw input is loaded once and used by
    # R + 1 tokens without an exchange between threads.
    raw = ()
    for n in tl.static_range(R + TOKENS):
        token = begin + n - R
        ptrs = mixed_ptr + token * stride
        if n < R:
            past = conv_history_ptr + wrap_index(conv_index + token, conv_len) * C
            ptrs = tl.where(token < 0, past, ptrs)
        raw = raw + (tl.load(ptrs + channel, mask=channel_mask & (token < length), other=0.0),)
    taps = ()
    for n in tl.static_range(R + 1):
        tap = tl.load(conv_weight_ptr + n * C + channel, mask=channel_mask, other=0.0)
        taps = taps + (tap.to(tl.float32),)
    x = ()
    for t in tl.static_range(TOKENS):
        # Taps are added in ascending order, as in the reference: the order is part of the contract.
        acc = tl.zeros((1, BLOCK), tl.float32)
        for n in tl.static_range(R + 1):
            acc += raw[t + n].to(tl.float32) * taps[n]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)
        x = x + (silu_approx(acc),)
    return x, raw


@triton.jit
def _load_tap(conv_weight_ptr, n, channel, channel_mask, C: tl.constexpr):
    """Load tap n of the convolution of these channels: [1, channels] fp32."""
    tap = tl.load(conv_weight_ptr + n * C + channel, mask=channel_mask, other=0.0)
    return tap.to(tl.float32)[None, :]


@triton.jit
def convolve_chunk(
    mixed_ptr, conv_history_ptr, conv_weight_ptr, bias_ptr, channel, channel_mask, begin, offset,
    count, start, conv_len, token_stride,
    C: tl.constexpr, R: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Convolve the tokens of a prompt chunk, with SiLU: [GRID, channels] fp32.

    channel: channels of this CTA, where channel_mask is true. begin: token index of the row's first
    token in mixed. offset: tokens of the row before the chunk. count: tokens of the chunk. start:
    position of the row's first token. conv_history_ptr: history of raw inputs before `start`.
    """
    offs_t = tl.arange(0, GRID)
    acc = tl.zeros((GRID, channel.shape[0]), tl.float32)
    # Only the row's first chunk in this step reads the history: the tokens before any later chunk
    # are in mixed. Taps stay in ascending order, since a token's taps in the history come first;
    # all others add zeros. The branch is apart from the loads below, which are then issued at once.
    if offset == 0:
        for n in tl.static_range(R):
            token = offs_t + n - R
            past_mask = ((token < 0) & (start > 0))[:, None] & channel_mask[None, :]
            index = (start + token + conv_len) % conv_len
            past = conv_history_ptr + index[:, None] * C + channel[None, :]
            raw = tl.load(past, mask=past_mask, other=0.0)
            acc += raw.to(tl.float32) * _load_tap(conv_weight_ptr, n, channel, channel_mask, C)
    # Offsets within a chunk have 32 bits: fewer instructions than a 64-bit product per token.
    mixed_ptr += (begin + offset) * token_stride
    for n in tl.static_range(R + 1):
        token = offs_t + n - R
        token_mask = ((offset + token >= 0) & (offs_t < count))[:, None] & channel_mask[None, :]
        offs = token[:, None] * token_stride + channel[None, :]
        raw = tl.load(mixed_ptr + offs, mask=token_mask, other=0.0)
        acc += raw.to(tl.float32) * _load_tap(conv_weight_ptr, n, channel, channel_mask, C)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
    return silu_approx(acc)
