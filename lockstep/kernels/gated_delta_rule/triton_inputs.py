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
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolved(
    mixed, conv, taps, first, width, t, line_0, length, lines, stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels from `first` of tokens t: SiLU of the convolution, and the raw inputs: [T, BLOCK].

    Tokens before the window come out of the ring.
    """
    live = tl.arange(0, BLOCK) < width
    inside, c = (t < length)[:, None] & live[None, :], first + tl.arange(0, BLOCK)
    total = tl.zeros((t.shape[0], BLOCK), tl.float32)
    for j in tl.static_range(R + 1):
        at = t + j - R
        old = conv + line_of(line_0 + at, lines)[:, None] * C + c[None, :]
        new = mixed + at[:, None] * stride + c[None, :]
        raw = tl.load(tl.where((at < 0)[:, None], old, new), mask=inside, other=0.0)
        tap = tl.load(taps + j * C + c, mask=live, other=0.0)[None, :]
        total += raw.to(tl.float32) * tap.to(tl.float32)
    return _silu(total), raw


@triton.jit
def _convolved_each(
    mixed, conv, taps, first, width, begin, line_0, length, lines, stride,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The same of tokens from `begin` on, in tuples of [1, BLOCK]: each line is read once."""
    i = tl.arange(0, BLOCK)[None, :]
    live, c = i < width, first + i
    raw = ()
    for n in tl.static_range(R + TOKENS):
        at = begin + n - R
        new = mixed + at * stride
        if n < R:
            new = tl.where(at < 0, conv + line_of(line_0 + at, lines) * C, new)
        raw = raw + (tl.load(new + c, mask=live & (at < length), other=0.0),)
    tap = ()
    for n in tl.static_range(R + 1):
        tap = tap + (tl.load(taps + n * C + c, mask=live, other=0.0).to(tl.float32),)
    x = ()
    for t in tl.static_range(TOKENS):
        total = tl.zeros((1, BLOCK), tl.float32)
        for n in tl.static_range(R + 1):
            total += raw[t + n].to(tl.float32) * tap[n]
        x = x + (_silu(total),)
    return x, raw


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
def _keep_gates(g, rate, kept_decay, of_gates, t, line, length, width, HV: tl.constexpr):
    """A value head's decay and beta to where the window reads them, and decay to its ring."""
    live, fade = t < length, tl.exp(g)
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
            mixed, conv, taps, kh * K, K, t, line, length, lines, stride, C, R, BLOCK_K
        )
        c = (HK + kh) * K
        k, raw_k = _convolved(
            mixed, conv, taps, c, K, t, line, length, lines, stride, C, R, BLOCK_K
        )
        c = 2 * HK * K + h * V
        v, raw_v = _convolved(
            mixed, conv, taps, c, V, t, line, length, lines, stride, C, R, BLOCK_V
        )
        g, rate = gates(raw_a, raw_b, log_rate, bias)
        _keep_keys(
            q, raw_q, k, raw_k, conv, kept_k, of_q, of_k, kh, t, to, length, first, width,
            HK, K, C, BLOCK_K, EPS,
        )  # fmt: skip
        _keep_gates(g, rate, kept_decay, of_gates, t, to, length, width, HV)
        j = tl.arange(0, BLOCK_V)[None, :]
        mask = live[:, None] & (j < V)
        tl.store(of_v + t[:, None] * width + j, v, mask=mask)
        tl.store(conv + to[:, None] * C + c + j, raw_v, mask=mask)


@triton.jit
def _key_inputs(
    mixed, taps, conv, kept_k, heads, unit, begin, line, length, lines, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of head `unit` of [all q | all k]: to the window's place, and to the rings."""
    C: tl.constexpr = 2 * HK * K + HV * V
    c, i = unit * K, tl.arange(0, BLOCK)[None, :]
    x, raw = _convolved_each(
        mixed, conv, taps, c, K, begin, line, length, lines, stride, C, R, BLOCK, TOKENS
    )
    for n in tl.static_range(TOKENS):
        t = begin + n
        to, mask = line_of(line + t, lines), (i < K) & (t < length)
        each = _normal(x[n], EPS)
        if unit < HK:
            each *= K**-0.5
        else:
            tl.store(kept_k + to * (HK * K) + (c - HK * K) + i, each, mask=mask)
        tl.store(heads + t * (C + 2 * HV) + c + i, each, mask=mask)
        tl.store(conv + to * C + c + i, raw[R + n], mask=mask)


@triton.jit
def _value_inputs(
    mixed, taps, conv, heads, h, begin, line, length, lines, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of value head h: to the window's place, and to the ring."""
    C: tl.constexpr = 2 * HK * K + HV * V
    c, j = 2 * HK * K + h * V, tl.arange(0, BLOCK)[None, :]
    x, raw = _convolved_each(
        mixed, conv, taps, c, V, begin, line, length, lines, stride, C, R, BLOCK, TOKENS
    )
    for n in tl.static_range(TOKENS):
        t = begin + n
        to, mask = line_of(line + t, lines), (j < V) & (t < length)
        tl.store(heads + t * (C + 2 * HV) + c + j, x[n], mask=mask)
        tl.store(conv + to * C + c + j, raw[R + n], mask=mask)


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
    """One (row, head of q, k or v): what it is to all who read it, and v's decay and beta."""
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = C + 2 * HV
    s, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, line = tl.load(slots + s).to(tl.int64), tl.load(starts + s).to(tl.int32) % lines
    token = s * length
    mixed += token * stride
    conv += slot * lines * C
    kept_k += slot * lines * (HK * K)
    heads += token * WIDTH
    for begin in range(0, length, TOKENS):
        if unit < 2 * HK:
            _key_inputs(
                mixed, taps, conv, kept_k, heads, unit, begin, line, length, lines, stride,
                HK, HV, K, V, R, BLOCK_K, TOKENS, L2_EPS,
            )  # fmt: skip
        else:
            h, t = unit - 2 * HK, begin + tl.arange(0, TOKENS)
            raw_a = tl.load(a + (token + t) * a_stride + h, mask=t < length, other=0.0)
            raw_b = tl.load(b + (token + t) * b_stride + h, mask=t < length, other=0.0)
            _value_inputs(
                mixed, taps, conv, heads, h, begin, line, length, lines, stride,
                HK, HV, K, V, R, BLOCK_V, TOKENS,
            )  # fmt: skip
            g, rate = gates(raw_a, raw_b, tl.load(a_log + h), tl.load(dt_bias + h))
            _keep_gates(
                g, rate, kept_decay + slot * lines * HV + h, heads + C + 2 * h, t,
                line_of(line + t, lines), length, WIDTH, HV,
            )  # fmt: skip


@triton.jit
def near(
    kept_k, kept_u, q, k, v, width, first, line, count, lines, length,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MOST: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """Brings what the last pending and the first new tokens need into L1, a word of each sector.

    A load whose value is not used is dropped, and a volatile one leaves nothing in L1. So a NaN is
    stored back to where it came from, which changes nothing.
    """
    n = tl.arange(0, MOST)[:, None]
    i = (tl.arange(0, BLOCK_K // SECTOR) * SECTOR)[None, :]
    j = first + (tl.arange(0, (BLOCK_V + SECTOR - 1) // SECTOR) * SECTOR)[None, :]
    line = line_of(line - 1 - tl.minimum(n, tl.maximum(count - 1, 0)), lines)
    t = tl.minimum(n, length - 1) * width
    in_k, in_v = (n >= 0) & (i < K), (n >= 0) & (j < V)
    of_k, of_u = kept_k + line * (HK * K) + i, kept_u + line * (HV * V) + j
    places = ((of_k, in_k), (of_u, in_v), (q + t + i, in_k), (k + t + i, in_k), (v + t + j, in_v))
    words = ()
    for p in tl.static_range(len(places)):
        words = words + (tl.load(places[p][0], mask=places[p][1], other=0.0),)
    for p in tl.static_range(len(places)):
        tl.store(places[p][0], words[p], mask=places[p][1] & (words[p] != words[p]))


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
