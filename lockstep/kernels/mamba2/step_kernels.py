# mypy: ignore-errors
"""mamba2_step in Triton: the state is read once and written at most once.

Two kernels a call. step_inputs_kernel makes what the window's tokens bring and fills the rings of
raw inputs, B and decays; recurrent/step_kernel.py replays, writes and steps.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.convolution import convolve_window
from lockstep.kernels.device.history import wrapped
from lockstep.kernels.mamba2.discretization import time_steps


@triton.jit
def _unit_inputs(
    mixed, taps, bias, conv, heads, kept, channel, unit_width, begin, conv_slot, ring_slot, length,
    conv_slots, ring_slots, stride, kept_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of the unit_width channels from `channel` on, to `heads` and to the ring of raw
    inputs; to `kept`, a ring, where it is not None."""
    lanes = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed, conv, taps, channel, unit_width, begin, conv_slot, length, conv_slots, stride, C, R,
        BLOCK, TOKENS, bias,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        to = wrapped(ring_slot + t, ring_slots)
        place = conv + wrapped(conv_slot + t, conv_slots) * C
        mask = (lanes < unit_width) & (t < length)
        if kept is not None:
            tl.store(kept + to * kept_stride + lanes, x[n], mask=mask)
        tl.store(heads + t * WIDTH + lanes, x[n], mask=mask)
        tl.store(place + channel + lanes, raw[R + n], mask=mask)


@triton.jit(
    do_not_specialize=["length", "conv_slots", "ring_slots", "dt_stride", "shortest", "longest"],
    do_not_specialize_on_alignment=["dt", "slots", "starts"],
)
def step_inputs_kernel(
    mixed, dt, taps, bias, a_log, dt_bias, conv, ring_k, ring_decay, slots, starts, heads,
    length, conv_slots, ring_slots, stride, dt_stride, shortest, longest,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One (row, group of C, group of B or head of x): its window's inputs; for a head of x decay
    and time step too.

    heads [S * Q, C + 2 HV]: all C, all B, all x, and (decay, time step) of each head.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = C + 2 * HV
    s = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    slot = tl.load(slots + s).to(tl.int64)
    start = tl.load(starts + s).to(tl.int32)
    conv_slot = start % conv_slots
    ring_slot = start % ring_slots
    token = s * length
    mixed += token * stride
    conv += slot * conv_slots * C
    ring_k += slot * ring_slots * (HK * K)
    heads += token * WIDTH
    for begin in range(0, length, TOKENS):
        if unit < HK:
            _unit_inputs(
                mixed, taps, bias, conv, heads + unit * K, None, HV * V + (HK + unit) * K, K, begin,
                conv_slot, ring_slot, length, conv_slots, ring_slots, stride, 0, C, WIDTH, R,
                BLOCK_K, TOKENS,
            )  # fmt: skip
        elif unit < 2 * HK:
            g = unit - HK
            _unit_inputs(
                mixed, taps, bias, conv, heads + unit * K, ring_k + g * K, HV * V + g * K, K, begin,
                conv_slot, ring_slot, length, conv_slots, ring_slots, stride, HK * K, C, WIDTH, R,
                BLOCK_K, TOKENS,
            )  # fmt: skip
        else:
            h = unit - 2 * HK
            t = begin + tl.arange(0, TOKENS)
            live = t < length
            raw = tl.load(dt + (token + t) * dt_stride + h, mask=live, other=0.0)
            _unit_inputs(
                mixed, taps, bias, conv, heads + 2 * HK * K + h * V, None, h * V, V, begin,
                conv_slot, ring_slot, length, conv_slots, ring_slots, stride, 0, C, WIDTH, R,
                BLOCK_V, TOKENS,
            )  # fmt: skip
            step, grown = time_steps(
                raw, tl.load(a_log + h), tl.load(dt_bias + h), shortest, longest
            )
            decay = tl.exp(grown)
            to = wrapped(ring_slot + t, ring_slots)
            of_gates = heads + C + 2 * h + t * WIDTH
            tl.store(of_gates, decay, mask=live)
            tl.store(of_gates + 1, step, mask=live)
            tl.store(ring_decay + slot * ring_slots * HV + h + to * HV, decay, mask=live)
