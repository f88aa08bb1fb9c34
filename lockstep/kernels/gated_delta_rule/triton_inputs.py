"""What both laws make of raw projections in Triton, and what a generated window is made of."""

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
def fold(x):
    """[n, m] -> [n], m a power of 2: neighbours, then neighbours of those sums, and so on.

    Sums of two: so no layout and no number of warps can change the order.
    """
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def line_of(line, lines):
    """A line that may lie up to one ring before or behind the ring, put into it."""
    line = tl.where(line < 0, line + lines, line)
    return tl.where(line >= lines, line - lines, line)


@triton.jit
def _convolved(
    mixed, conv, taps, c, live, t, line_0, lines, stride, C: tl.constexpr, R: tl.constexpr
):
    """Channels c [n, m] of tokens t [n, 1]: SiLU of the convolution, and the raw inputs."""
    total = tl.zeros(live.shape, tl.float32)
    for j in tl.static_range(R + 1):
        at = t + j - R
        old = tl.load(conv + line_of(line_0 + at, lines) * C + c, mask=live & (at < 0), other=0.0)
        raw = tl.load(mixed + at * stride + c, mask=live & (at >= 0), other=0.0)
        raw = tl.where(at < 0, old, raw)
        total += raw.to(tl.float32) * tl.load(taps + j * C + c, mask=live, other=0.0)
    return total / (1.0 + tl.exp(-total)), raw


@triton.jit
def inputs(
    mixed, b, a, conv, taps, log_rate, bias, kept_k, kept_decay, heads, line_0, length, lines,
    stride, b_stride, a_stride, h,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """q, k, v and beta of the window to heads; what is kept to its ring, by one program.

    q, k and v of a token are lines of one tile, and a fourth one that is empty.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    kh, first, i = h // (HV // HK), h % (HV // HK) == 0, tl.arange(0, BLOCK)[None, :]
    unit, t_0 = tl.arange(0, 4 * TOKENS)[:, None] % 4, tl.arange(0, 4 * TOKENS)[:, None] // 4
    c = unit * (HK * K) + tl.where(unit == 2, h, kh) * tl.where(unit == 2, V, K) + i
    live = (unit < 3) & (i < tl.where(unit == 2, V, K))
    for begin in range(0, length, TOKENS):
        t = begin + t_0
        inside, line = live & (t < length), line_of(line_0 + t, lines)
        x, raw = _convolved(mixed, conv, taps, c, inside, t, line_0, lines, stride, C, R)
        scale = tl.rsqrt(fold(x * x) + EPS)[:, None]
        x = tl.where(unit < 2, x * scale, x)
        x = tl.where(unit == 0, x * K**-0.5, x)
        tl.store(heads + t * WIDTH + unit * K + i, x, mask=inside)
        tl.store(kept_k + line * (HK * K) + kh * K + i, x, mask=inside & (unit == 1) & first)
        tl.store(conv + line * C + c, raw, mask=inside & ((unit == 2) | first))
        t = begin + tl.arange(0, TOKENS)
        raw_a = tl.load(a + t * a_stride, mask=t < length, other=0.0)
        raw_b = tl.load(b + t * b_stride, mask=t < length, other=0.0)
        g, rate = gates(raw_a, raw_b, log_rate, bias)
        tl.store(heads + t * WIDTH + 2 * K + V, rate, mask=t < length)
        tl.store(kept_decay + line_of(line_0 + t, lines) * HV, tl.exp(g), mask=t < length)


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
