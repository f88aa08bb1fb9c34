# mypy: ignore-errors
"""The causal convolution of a window's tokens in Triton, whose past comes out of a ring."""

import triton
import triton.language as tl

from lockstep.kernels.activations._device import silu_approx
from lockstep.kernels.recurrent._rings_triton import wrapped


@triton.jit
def convolve_window(
    mixed, conv, taps, first, width, begin, conv_slot, length, conv_slots, stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Channels first .. first + width - 1 of TOKENS tokens from `begin` on: tuples of [1, BLOCK].

    -> SiLU of the convolution of each token, fp32; raw inputs, those of R earlier tokens in front.
    mixed: the window's first token, `stride` between tokens; conv: the row's ring [conv_slots, C]
    of raw inputs, in which the window begins at conv_slot. Every raw input is loaded once.
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
        x = x + (silu_approx(total),)
    return x, raw
