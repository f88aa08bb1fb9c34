# mypy: ignore-errors
"""What a generated window's tokens bring, made once for all that read it.

`heads` [S * Q, C + 2 HV] fp32 holds a token's q, k and v as the recurrence reads them, then decay
and beta of every value head.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.convolution import convolve_window
from lockstep.kernels.device.history import wrapped
from lockstep.kernels.device.reductions import pairwise_sum
from lockstep.kernels.gated_delta_rule.gating import gates


@triton.jit
def _l2_normalised(x, EPS: tl.constexpr):
    return x * tl.rsqrt(pairwise_sum(x * x) + EPS)[:, None]


@triton.jit
def _key_inputs(
    mixed, taps, conv, ring_k, heads, unit, begin, conv_slot, ring_slot, length, conv_slots,
    ring_slots, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of head `unit` of [all q | all k]: to `heads`, and to the rings."""
    C: tl.constexpr = 2 * HK * K + HV * V
    first = unit * K
    lanes = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed, conv, taps, first, K, begin, conv_slot, length, conv_slots, stride, C, R, BLOCK,
        TOKENS, None,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        to = wrapped(ring_slot + t, ring_slots)
        place = conv + wrapped(conv_slot + t, conv_slots) * C
        mask = (lanes < K) & (t < length)
        values = _l2_normalised(x[n], EPS)
        if unit < HK:
            values *= K**-0.5
        else:
            tl.store(ring_k + to * (HK * K) + (first - HK * K) + lanes, values, mask=mask)
        tl.store(heads + t * (C + 2 * HV) + first + lanes, values, mask=mask)
        tl.store(place + first + lanes, raw[R + n], mask=mask)


@triton.jit
def _value_inputs(
    mixed, taps, conv, heads, h, begin, conv_slot, length, conv_slots, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of value head h: to `heads`, and to the ring of raw inputs."""
    C: tl.constexpr = 2 * HK * K + HV * V
    first = 2 * HK * K + h * V
    lanes = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed, conv, taps, first, V, begin, conv_slot, length, conv_slots, stride, C, R, BLOCK,
        TOKENS, None,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        place = conv + wrapped(conv_slot + t, conv_slots) * C
        mask = (lanes < V) & (t < length)
        tl.store(heads + t * (C + 2 * HV) + first + lanes, x[n], mask=mask)
        tl.store(place + first + lanes, raw[R + n], mask=mask)


@triton.jit(
    do_not_specialize=["length", "conv_slots", "ring_slots", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts"],
)
def inputs_kernel(
    mixed, b, a, taps, a_log, dt_bias, conv, ring_k, ring_decay, slots, starts, heads,
    length, conv_slots, ring_slots, stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, head of q, k or v): its window's inputs; for a head of v decay and beta too."""
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
        if unit < 2 * HK:
            _key_inputs(
                mixed, taps, conv, ring_k, heads, unit, begin, conv_slot, ring_slot, length,
                conv_slots, ring_slots, stride, HK, HV, K, V, R, BLOCK_K, TOKENS, L2_EPS,
            )  # fmt: skip
        else:
            h = unit - 2 * HK
            t = begin + tl.arange(0, TOKENS)
            live = t < length
            raw_a = tl.load(a + (token + t) * a_stride + h, mask=live, other=0.0)
            raw_b = tl.load(b + (token + t) * b_stride + h, mask=live, other=0.0)
            _value_inputs(
                mixed, taps, conv, heads, h, begin, conv_slot, length, conv_slots, stride,
                HK, HV, K, V, R, BLOCK_V, TOKENS,
            )  # fmt: skip
            g, beta = gates(raw_a, raw_b, tl.load(a_log + h), tl.load(dt_bias + h))
            decay = tl.exp(g)
            to = wrapped(ring_slot + t, ring_slots)
            of_gates = heads + C + 2 * h + t * WIDTH
            tl.store(of_gates, decay, mask=live)
            tl.store(of_gates + 1, beta, mask=live)
            tl.store(ring_decay + slot * ring_slots * HV + h + to * HV, decay, mask=live)


@triton.jit(do_not_specialize=["heads", "eps"])
def norm_kernel(
    o, z, norm, out, heads, z_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS of all `heads` outputs: o / rms(o) * norm * silu(z). See gated_rms_norm."""
    n = (tl.program_id(0) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    j = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (n < heads) & (j < V)
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    gate = tl.load(z + n // HV * z_stride + n % HV * V + j, mask=mask, other=0.0)
    x = tl.load(o + n * V + j, mask=mask, other=0.0)
    squares = pairwise_sum(tl.reshape(x * x, (HEADS, BLOCK_V)))[:, None, None]
    x = x * tl.rsqrt(squares / V + eps) * weight * silu_approx(gate.to(tl.float32))
    tl.store(out + n * V + j, x.to(out.dtype.element_ty), mask=mask)
