"""gated_delta_step in Triton: one program per row and value head does the whole mixer, once.

A warp owns V / warps columns of the state and all of K, so sums over K stay inside it and the token
loop has no barrier but the norm's. Rows, tokens, window and ring length are run-time values: one
binary serves single steps, windows and replay, at any number of drafts, so they share their bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaState,
    GatedDeltaWeights,
    gated_delta_step,
)

MOST_REGISTERS = 128
"""Of a thread: two programs of 8 warps share a multiprocessor, 128 KB of state in flight."""
ALIGNED = 16
PAD = 4
"""Floats behind a token's q, k and v in the scratch: decay, beta, and two to keep lines aligned."""


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
def _line(line, lines):
    """A line that may lie up to one ring before or behind the ring, put into it."""
    line = tl.where(line < 0, line + lines, line)
    return tl.where(line >= lines, line - lines, line)


@triton.jit
def _convolved(
    mixed, conv, taps, c, live, t, first, length, lines, stride, C: tl.constexpr, R: tl.constexpr
):
    """Channels c of tokens t: SiLU of the convolution, and the raw inputs, as tiles [T, channels].

    Tokens before the window come out of the ring.
    """
    inside = (t < length)[:, None] & live[None, :]
    total = tl.zeros((t.shape[0], c.shape[0]), tl.float32)
    for j in tl.static_range(R + 1):
        at = t + j - R
        old = conv + _line(first + at, lines)[:, None] * C + c[None, :]
        new = mixed + at[:, None] * stride + c[None, :]
        raw = tl.load(tl.where((at < 0)[:, None], old, new), mask=inside, other=0.0)
        tap = tl.load(taps + j * C + c, mask=live, other=0.0).to(tl.float32)
        total += raw.to(tl.float32) * tap[None, :]
    return total / (1.0 + tl.exp(-total)), raw


@triton.jit
def _normal(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]


@triton.jit
def _inputs(
    mixed, b, a, conv, taps, log_rate, bias, kept_k, kept_decay, heads, line_0, length, lines,
    stride, b_stride, a_stride, h,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr, PAD: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """q, k, v, decay and beta of the window to heads; what is kept to its ring, by one program."""
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = 2 * K + V + PAD
    kh, first = h // (HV // HK), h % (HV // HK) == 0
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    for begin in range(0, length, TOKENS):
        t = begin + tl.arange(0, TOKENS)
        line = _line(line_0 + t, lines)
        mask_k, mask_v = (t < length)[:, None] & (i < K)[None, :], (t < length)[:, None] & (j < V)
        ring, out = conv + line[:, None] * C, heads + t[:, None] * WIDTH
        raw_a = tl.load(a + t * a_stride, mask=t < length, other=0.0)
        raw_b = tl.load(b + t * b_stride, mask=t < length, other=0.0)
        of_q, of_k, of_v = kh * K + i, (HK + kh) * K + i, 2 * HK * K + h * V + j
        q, raw_q = _convolved(
            mixed, conv, taps, of_q, i < K, t, line_0, length, lines, stride, C, R
        )
        k, raw_k = _convolved(
            mixed, conv, taps, of_k, i < K, t, line_0, length, lines, stride, C, R
        )
        v, raw_v = _convolved(
            mixed, conv, taps, of_v, j < V, t, line_0, length, lines, stride, C, R
        )
        k = _normal(k, EPS)
        tl.store(out + i[None, :], _normal(q, EPS) * K**-0.5, mask=mask_k)
        tl.store(out + K + i[None, :], k, mask=mask_k)
        tl.store(out + 2 * K + j[None, :], v, mask=mask_v)
        keep = kept_k + line[:, None] * (HK * K) + kh * K + i[None, :]
        tl.store(keep, k, mask=mask_k & first)
        tl.store(ring + of_q[None, :], raw_q, mask=mask_k & first)
        tl.store(ring + of_k[None, :], raw_k, mask=mask_k & first)
        tl.store(ring + of_v[None, :], raw_v, mask=mask_v)
        g, rate = gates(raw_a, raw_b, log_rate, bias)
        fade, out = tl.exp(g), heads + t * WIDTH + 2 * K + V
        tl.store(out, fade, mask=t < length)
        tl.store(out + 1, rate, mask=t < length)
        tl.store(kept_decay + line * HV, fade, mask=t < length)


@triton.jit
def _sum_k(x):
    """[KT, VB, KR, VI] -> [1, VB, 1, VI]: first a lane's own KR, then the KT lanes."""
    return tl.sum(tl.sum(x, 2, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _write(state, fade, k, u):
    """The decay and the rank-1 update: the one expression of stepping and replay."""
    return tl.fma(tl.broadcast_to(k, state.shape), tl.broadcast_to(u, state.shape), state * fade)


@triton.jit
def _store_v(place, x, kt, inside):
    """Stores x [1, VB, 1, VI], which all KT lanes hold, from the first of them as it lies."""
    place, first = place + tl.zeros_like(kt), inside & (kt == 0)
    tl.store(place, tl.broadcast_to(x, place.shape).to(place.dtype.element_ty), mask=first)


@triton.jit
def _after(line, lines):
    return tl.where(line + 1 == lines, 0, line + 1)


@triton.jit
def _replay(
    state, kept_k, kept_u, kept_decay, kt, kr, j, line, count, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The state after `count` tokens out of the rings; the next token is read a turn ahead."""
    more = count > 0
    k = tl.load(kept_k + line * (HK * K) + kt + kr, mask=(kt + kr < K) & more, other=0.0)
    u = tl.load(kept_u + line * (HV * V) + j, mask=(j < V) & more, other=0.0)
    fade = tl.load(kept_decay + line * HV, mask=more, other=0.0)
    for n in range(count):
        now_k, now_u, now_fade = k, u, fade
        line, more = _after(line, lines), n + 1 < count
        k = tl.load(kept_k + line * (HK * K) + kt + kr, mask=(kt + kr < K) & more, other=0.0)
        u = tl.load(kept_u + line * (HV * V) + j, mask=(j < V) & more, other=0.0)
        fade = tl.load(kept_decay + line * HV, mask=more, other=0.0)
        state = _write(state, now_fade, now_k, now_u)
    return state


@triton.jit
def _gated_norm(o, z, weight, eps, V: tl.constexpr):
    """o [1, VB, 1, VI] / rms * weight * silu(z)."""
    square = tl.sum(tl.sum(o * o, 3, keep_dims=True), 1, keep_dims=True)
    z = z.to(tl.float32)
    return o * tl.rsqrt(square / V + eps) * weight * (z / (1.0 + tl.exp(-z)))


@triton.jit
def _window(
    state, heads, z, out, kept_u, kt, kr, j, weight, line, length, lines, z_stride, eps,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """The new tokens, one after another. What a token needs first is read a turn ahead."""
    in_k, in_v = kt + kr < K, j < V
    k = tl.load(heads + K + kt + kr, mask=in_k, other=0.0)
    v = tl.load(heads + 2 * K + j, mask=in_v, other=0.0)
    fade, rate = tl.load(heads + 2 * K + V), tl.load(heads + 2 * K + V + 1)
    for t in range(length):
        more = t + 1 < length
        q = tl.load(heads + kt + kr, mask=in_k, other=0.0)
        gate = tl.load(z + j, mask=in_v, other=0.0)
        u = (v - _sum_k(k * (state * fade))) * rate
        state = _write(state, fade, k, u)
        heads, z = heads + (2 * K + V + PAD), z + z_stride
        k = tl.load(heads + K + kt + kr, mask=in_k & more, other=0.0)
        v = tl.load(heads + 2 * K + j, mask=in_v & more, other=0.0)
        fade = tl.load(heads + 2 * K + V, mask=more, other=0.0)
        rate = tl.load(heads + 2 * K + V + 1, mask=more, other=0.0)
        o = _gated_norm(_sum_k(q * state), gate, weight, eps, V)
        _store_v(out + t * (HV * V) + j, o, kt, in_v)
        _store_v(kept_u + line * (HV * V) + j, u, kt, in_v)
        line = _after(line, lines)


@triton.jit(
    do_not_specialize=["length", "lines", "flush", "eps", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts", "pending"],
)
def _step_kernel(
    mixed, z, b, a, taps, a_log, dt_bias, norm, recurrent, conv, kept_u, kept_k, kept_decay,
    slots, starts, pending, heads, out, length, lines, flush, eps,
    mixed_stride, z_stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    KT: tl.constexpr, KR: tl.constexpr, VB: tl.constexpr, VI: tl.constexpr,
    TOKENS: tl.constexpr, PAD: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, value head): read the state, make the inputs, replay, write the state, step."""
    program = tl.program_id(0).to(tl.int64)
    s, h = program // HV, (program % HV).to(tl.int32)
    kh = h // (HV // HK)
    kt = tl.arange(0, KT)[:, None, None, None]
    kr = (tl.arange(0, KR) * KT)[None, None, :, None]
    j = (tl.arange(0, VB) * VI)[None, :, None, None] + tl.arange(0, VI)[None, None, None, :]
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    log_rate, bias = tl.load(a_log + h), tl.load(dt_bias + h)
    slot = tl.load(slots + s).to(tl.int64)
    start, count = tl.load(starts + s).to(tl.int32), tl.load(pending + s).to(tl.int32)
    place = recurrent + (slot * HV + h) * (K * V) + kt * V + j + kr * V
    inside = (kt + kr < K) & (j < V)
    state = tl.load(place, mask=inside, other=0.0)
    line = start % lines
    mixed += s * length * mixed_stride
    conv += slot * lines * (2 * HK * K + HV * V)
    kept_k += slot * lines * (HK * K)
    kept_u += slot * lines * (HV * V) + h * V
    kept_decay += slot * lines * HV + h
    heads += program * length * (2 * K + V + PAD)
    token = s * length
    _inputs(
        mixed, b + token * b_stride + h, a + token * a_stride + h, conv, taps, log_rate, bias,
        kept_k, kept_decay, heads, line, length, lines, mixed_stride, b_stride, a_stride, h,
        HK, HV, K, V, R, KR * KT, VB * VI, TOKENS, PAD, L2_EPS,
    )  # fmt: skip
    state = _replay(
        state, kept_k + kh * K, kept_u, kept_decay, kt, kr, j, _line(line - count, lines), count,
        lines, HK, HV, K, V,
    )  # fmt: skip
    if count >= flush:
        tl.store(place, state, mask=inside)
    tl.debug_barrier()  # heads are written, kept u and decay are read
    _window(
        state, heads, z + token * z_stride + h * V, out + (token * HV + h) * V, kept_u, kt, kr, j,
        weight, line, length, lines, z_stride, eps, HV, K, V, PAD,
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


def layout_of(sizes: dict[str, int]) -> dict[str, int]:
    """How the state lies in a program's registers: KR x KT rows, VB warps of VI columns.

    A lane holds 4 neighbours of VI, so VI / 4 x KT lanes make a warp. There are more lanes than K
    and than V, or else the compiler takes vectors over shared memory. 1 to 8 warps.
    """
    k, v = blocks_of(sizes, 128).values()
    warps = min(max(k, v) // 16, v // 4)
    columns = v // warps
    lanes = max(1, min(k, 128 // columns))
    return dict(KR=k // lanes, KT=lanes, VB=warps, VI=columns, TOKENS=4, num_warps=warps)


def _flat(x: Tensor) -> Tensor:
    """[S, Q, ...] -> [S * Q, ...], lines begun on a whole vector, so that one binary serves all."""
    flat = x.flatten(0, 1)
    whole = flat.stride(0) % ALIGNED == 0 and flat.data_ptr() % ALIGNED == 0
    if whole and flat[0].is_contiguous():
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


@gated_delta_step.backend("triton", supports=supports)
def gated_delta_step_triton(
    mixed: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    slots: Tensor,
    starts: Tensor,
    pending: Tensor,
    flush: int = 1,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_step."""
    (rows, length, _), sizes = mixed.shape, sizes_of(state)
    hv, k, v = sizes["HV"], sizes["K"], sizes["V"]
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    heads = torch.empty(
        rows * hv, length, 2 * k + v + PAD, dtype=torch.float32, device=mixed.device
    )
    mixed, z, b, a = _flat(mixed), _flat(z), b.flatten(0, 1), a.flatten(0, 1)
    _step_kernel[(rows * hv,)](
        mixed, z, b, a, weights.conv.t().contiguous(), weights.a_log, weights.dt_bias, weights.norm,
        state.recurrent, state.conv, state.u, state.k, state.decay, slots, starts, pending,
        heads, out, length, state.conv.shape[1], flush, weights.eps,
        mixed.stride(0), z.stride(0), b.stride(0), a.stride(0),
        **sizes, R=weights.conv.shape[1] - 1, PAD=PAD, L2_EPS=L2_EPS, **layout_of(sizes),
        enable_fp_fusion=False, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out
