# mypy: ignore-errors
"""What both laws make of raw projections in Triton, and a generated window's inputs."""

from typing import Any

import triton
import triton.language as tl

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.gated_delta_rule import GatedDeltaState


@triton.jit
def head_channels(unit, lanes, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """First channel and width of head `unit` of [all q | all k | all v]."""
    is_value = unit >= 2 * HK
    first = tl.where(is_value, 2 * HK * K + (unit - 2 * HK) * V, unit * K)
    return first + lanes, lanes < tl.where(is_value, V, K)


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Raw a, b and a head's parameters -> g, the log decay, and beta; log1p by Kahan's quotient."""
    x = a.to(tl.float32) + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    near = tl.where(1.0 + e == 1.0, 1.0, (1.0 + e) - 1.0)
    rise = tl.where(1.0 + e == 1.0, e, tl.log(1.0 + e) * (e / near))
    rise = tl.where(x > 20.0, x, rise)
    return -tl.exp(a_log) * rise, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def line_of(line, lines):
    """A line that may lie up to one ring before or behind the ring, put into it."""
    line = tl.where(line < 0, line + lines, line)
    return tl.where(line >= lines, line - lines, line)


@triton.jit
def fold(x):
    """[n, m] -> [n], m a power of 2: neighbours, then neighbours of those sums, and so on.

    Sums of two: so no layout and no number of warps can change the order.
    """
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def _convolved(
    mixed, conv, taps, first, width, t, line_0, length, lines, stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Channels from `first` of tokens t: SiLU of the convolution, and the raw inputs: [T, BLOCK].

    Tokens before the window come out of the ring: by ONE load that chooses, or by a load of whole
    vectors from each, which is faster where a tile is not spread over many warps.
    """
    live = tl.arange(0, BLOCK) < width
    inside, c = (t < length)[:, None] & live[None, :], first + tl.arange(0, BLOCK)
    total = tl.zeros((t.shape[0], BLOCK), tl.float32)
    for j in tl.static_range(R + 1):
        at = t + j - R
        past = (at < 0)[:, None]
        old = conv + line_of(line_0 + at, lines)[:, None] * C + c[None, :]
        new = mixed + at[:, None] * stride + c[None, :]
        if ONE:
            raw = tl.load(tl.where(past, old, new), mask=inside, other=0.0)
            tap = tl.load(taps + j * C + c, mask=live, other=0.0)[None, :]
        else:
            raw = tl.load(new, mask=inside & (at >= 0)[:, None], other=0.0)
            raw = tl.where(past, tl.load(old, mask=inside & past, other=0.0), raw)
            every = taps + j * C + c[None, :] + tl.zeros_like(at)[:, None]
            tap = tl.load(every, mask=inside, other=0.0)
        total += raw.to(tl.float32) * tap.to(tl.float32)
    return total / (1.0 + tl.exp(-total)), raw


@triton.jit
def _normal(x, EPS: tl.constexpr):
    return x * tl.rsqrt(fold(x * x) + EPS)[:, None]


@triton.jit
def _keep_keys(
    q, raw_q, k, raw_k, conv, kept_k, of_q, of_k, kh, t, line, length, writes, width,
    HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """A key head's q and k to where the window reads them, and to the rings where `writes`."""
    i = tl.arange(0, BLOCK)[None, :]
    mask, place = (t < length)[:, None] & (i < K), t[:, None] * width + i
    q, k = _normal(q, EPS) * K**-0.5, _normal(k, EPS)
    tl.store(of_q + place, q, mask=mask)
    tl.store(of_k + place, k, mask=mask)
    ring = conv + line[:, None] * C + kh * K + i
    tl.store(kept_k + line[:, None] * (HK * K) + kh * K + i, k, mask=mask & writes)
    tl.store(ring, raw_q, mask=mask & writes)
    tl.store(ring + HK * K, raw_k, mask=mask & writes)


@triton.jit
def _keep_values(
    v, raw, g, rate, conv, kept_decay, of_v, of_gates, h, t, line, length, width,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A value head's v, decay and beta to where the window reads them, and to the rings."""
    C: tl.constexpr = 2 * HK * K + HV * V
    j, live = tl.arange(0, BLOCK)[None, :], t < length
    mask, fade = live[:, None] & (j < V), tl.exp(g)
    tl.store(of_v + t[:, None] * width + j, v, mask=mask)
    tl.store(conv + line[:, None] * C + 2 * HK * K + h * V + j, raw, mask=mask)
    tl.store(of_gates + t * width, fade, mask=live)
    tl.store(of_gates + t * width + 1, rate, mask=live)
    tl.store(kept_decay + line * HV, fade, mask=live)


@triton.jit
def inputs(
    mixed, b, a, taps, log_rate, bias, conv, kept_k, kept_decay, of_q, of_k, of_v, of_gates, h,
    token, line, length, lines, stride, b_stride, a_stride, width,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """All that a value head's window reads. The first head of a key head keeps its q and k."""
    C: tl.constexpr = 2 * HK * K + HV * V
    kh, first = h // (HV // HK), h % (HV // HK) == 0
    for begin in range(0, length, TOKENS):
        t = begin + tl.arange(0, TOKENS)
        to, live = line_of(line + t, lines), t < length
        raw_a = tl.load(a + (token + t) * a_stride + h, mask=live, other=0.0)
        raw_b = tl.load(b + (token + t) * b_stride + h, mask=live, other=0.0)
        q, raw_q = _convolved(
            mixed, conv, taps, kh * K, K, t, line, length, lines, stride, C, R, BLOCK_K, True
        )
        c = (HK + kh) * K
        k, raw_k = _convolved(
            mixed, conv, taps, c, K, t, line, length, lines, stride, C, R, BLOCK_K, True
        )
        c = 2 * HK * K + h * V
        v, raw_v = _convolved(
            mixed, conv, taps, c, V, t, line, length, lines, stride, C, R, BLOCK_V, True
        )
        g, rate = gates(raw_a, raw_b, log_rate, bias)
        _keep_keys(
            q, raw_q, k, raw_k, conv, kept_k, of_q, of_k, kh, t, to, length, first, width,
            HK, K, C, BLOCK_K, EPS,
        )  # fmt: skip
        _keep_values(
            v, raw_v, g, rate, conv, kept_decay, of_v, of_gates, h, t, to, length, width,
            HK, HV, K, V, BLOCK_V,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["length", "lines", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts"],
)
def inputs_kernel(
    mixed, b, a, taps, a_log, dt_bias, conv, kept_k, kept_decay, slots, starts, heads,
    length, lines, stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, key head or value head): q and k, or v, decay and beta, for all who read them."""
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = C + 2 * HV
    s, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, line = tl.load(slots + s).to(tl.int64), tl.load(starts + s).to(tl.int32) % lines
    token = s * length
    mixed += token * stride
    conv += slot * lines * C
    heads += token * WIDTH
    for begin in range(0, length, TOKENS):
        t = begin + tl.arange(0, TOKENS)
        to, live = line_of(line + t, lines), t < length
        if unit < HK:
            c = unit * K
            q, raw_q = _convolved(
                mixed, conv, taps, c, K, t, line, length, lines, stride, C, R, BLOCK_K, False
            )
            k, raw_k = _convolved(
                mixed, conv, taps, HK * K + c, K, t, line, length, lines, stride, C, R, BLOCK_K,
                False,
            )  # fmt: skip
            _keep_keys(
                q, raw_q, k, raw_k, conv, kept_k + slot * lines * (HK * K), heads + c,
                heads + HK * K + c, unit, t, to, length, True, WIDTH, HK, K, C, BLOCK_K, L2_EPS,
            )  # fmt: skip
        else:
            h = unit - HK
            c = 2 * HK * K + h * V
            raw_a = tl.load(a + (token + t) * a_stride + h, mask=live, other=0.0)
            raw_b = tl.load(b + (token + t) * b_stride + h, mask=live, other=0.0)
            v, raw_v = _convolved(
                mixed, conv, taps, c, V, t, line, length, lines, stride, C, R, BLOCK_V, False
            )
            g, rate = gates(raw_a, raw_b, tl.load(a_log + h), tl.load(dt_bias + h))
            _keep_values(
                v, raw_v, g, rate, conv, kept_decay + slot * lines * HV + h, heads + c,
                heads + C + 2 * h, h, t, to, length, WIDTH, HK, HV, K, V, BLOCK_V,
            )  # fmt: skip


def sizes_of(state: GatedDeltaState) -> dict[str, int]:
    """The constants of every kernel of a layer."""
    return dict(zip(("HK", "HV", "K", "V"), state.sizes(), strict=True))


def blocks_of(sizes: dict[str, int], most_v: int) -> dict[str, int]:
    k, v = (max(16, triton.next_power_of_2(sizes[n])) for n in "KV")
    return dict(BLOCK_K=k, BLOCK_V=min(v, most_v))


def supports(**traits: Any) -> str | None:
    for name in ("key_dim", "value_dim"):
        if not 1 <= traits.get(name, 64) <= 128:
            return f"{name} {traits[name]} is not in 1 .. 128"
    return gpu_trait(**traits)
