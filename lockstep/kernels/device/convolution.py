# mypy: ignore-errors
"""The causal convolution of windows and of prompt chunks in Triton; its past is in a ring."""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.history import wrapped


@triton.jit
def convolve_window(
    mixed, conv, taps, first, width, begin, conv_slot, length, conv_slots, stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, bias,
):  # fmt: skip
    """Channels first .. first + width - 1 of TOKENS tokens from `begin` on: tuples of [1, BLOCK].

    -> SiLU of the convolution of each token, fp32; raw inputs, those of R earlier tokens in front.
    mixed: the window's first token, `stride` between tokens; conv: the row's ring [conv_slots, C]
    of raw inputs, in which the window begins at conv_slot. Every raw input is loaded once. bias
    [C], or None.
    """
    lanes = tl.arange(0, BLOCK)[None, :]
    live = lanes < width
    channel = first + lanes
    raw = ()
    for n in tl.static_range(R + TOKENS):
        at = begin + n - R
        place = mixed + at * stride
        if n < R:
            past = conv + wrapped(conv_slot + at, conv_slots) * C
            place = tl.where(at < 0, past, place)
        raw = raw + (tl.load(place + channel, mask=live & (at < length), other=0.0),)
    tap = ()
    for n in tl.static_range(R + 1):
        one = tl.load(taps + n * C + channel, mask=live, other=0.0)
        tap = tap + (one.to(tl.float32),)
    x = ()
    for t in tl.static_range(TOKENS):
        total = tl.zeros((1, BLOCK), tl.float32)
        for n in tl.static_range(R + 1):
            total += raw[t + n].to(tl.float32) * tap[n]
        if bias is not None:
            total += tl.load(bias + channel, mask=live, other=0.0).to(tl.float32)
        x = x + (silu_approx(total),)
    return x, raw


@triton.jit
def convolve_chunk(
    mixed, conv, taps, bias, c, live, begin, offset, count, start, ring_slots, token_stride,
    channels: tl.constexpr, R: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of channels c (where live) of a prompt chunk: [GRID, len(c)] fp32.

    The chunk's `count` tokens begin `offset` tokens behind the row's first of this step, which is
    token `begin` of mixed and has position `start`; conv: the ring that holds those before it.
    """
    lanes = tl.arange(0, GRID)
    total = tl.zeros((GRID, c.shape[0]), tl.float32)
    for j in tl.static_range(R + 1):
        token = offset + lanes + j - R
        here = ((token >= 0) & (lanes < count))[:, None] & live[None, :]
        at = (begin + token)[:, None] * token_stride + c[None, :]
        raw = tl.load(mixed + at, mask=here, other=0.0)
        if offset == 0:  # the tokens before a later chunk are of this step
            before = ((token < 0) & (start > 0))[:, None] & live[None, :]
            ring_slot = (start + token + ring_slots) % ring_slots
            past = conv + ring_slot[:, None] * channels + c[None, :]
            old = tl.load(past, mask=before, other=0.0)
            raw = tl.where((token < 0)[:, None], old, raw)
        tap = tl.load(taps + j * channels + c, mask=live, other=0.0).to(tl.float32)
        total += raw.to(tl.float32) * tap[None, :]
    if bias is not None:
        total += tl.load(bias + c, mask=live, other=0.0).to(tl.float32)[None, :]
    return silu_approx(total)
