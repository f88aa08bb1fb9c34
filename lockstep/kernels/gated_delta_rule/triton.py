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
SLAB: tl.constexpr = tl.constexpr(32)
"""Partial sums of a dot product over K: part of the definition."""
PAD = 4
"""Floats behind a token's weights in the scratch: beta, decay, and two to keep lines aligned."""


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
    return x * tl.rsqrt(fold(x * x) + EPS)[:, None]


@triton.jit
def _inputs(
    mixed, b, a, conv, taps, log_rate, bias, kept_k, kept_decay, heads, line_0, length, lines,
    stride, b_stride, a_stride, h,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """q, k, v and beta of the window to heads; what is kept to its ring, by one program."""
    C: tl.constexpr = 2 * HK * K + HV * V
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
        tl.store(heads + t * WIDTH + 2 * K + 2 * V + 2 * G, rate, mask=t < length)
        tl.store(kept_decay + line * HV, tl.exp(g), mask=t < length)


@triton.jit
def _slabs(place, live, K: tl.constexpr):
    """Rows of K numbers at `place` [n, 1] as slabs [n, SLAB]: a warp asks for 128 bytes of 4 rows.

    A tuple, so that what is in one slab stays in registers of its own.
    """
    c = tl.arange(0, SLAB)[None, :]
    slabs = (tl.load(place + c, mask=live & (c < K), other=0.0),)
    for r in tl.static_range(1, (K + SLAB - 1) // SLAB):
        at = r * SLAB + c
        slabs = slabs + (tl.load(place + at, mask=live & (at < K), other=0.0),)
    return slabs


@triton.jit
def _fma(x, y, z):
    """x [n, 1] or [n, m], y [1, m], z [n, m]."""
    return tl.fma(tl.broadcast_to(x, z.shape), tl.broadcast_to(y, z.shape), z)


@triton.jit
def _dot(rows, x):
    """Slabs [n, SLAB] and [1, SLAB] -> [n]: SLAB sums, each over ascending slabs, and fold."""
    total = rows[0] * x[0]
    for r in tl.static_range(1, len(rows)):
        total = _fma(rows[r], x[r], total)
    return fold(total)


@triton.jit
def _cell_weights(
    heads, kept_k, kept_decay, ends, base, start, length, line_0, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What a new token takes of each token of its cell, for delta and output; the decay since.

    To heads: k_t k_j and q_t k_j, times the decay from j to t; of the state before the cell, the
    decay to t. To ends: the decays to the end of each cell.
    """
    j = tl.arange(0, G)
    for cell in range(base // G, (start + length - 1) // G + 1):
        first = cell * G - start
        t = first + j
        old = kept_k + _line(line_0 + t, lines)[:, None] * (HK * K)
        place = tl.where((t < 0)[:, None], old, heads + t[:, None] * WIDTH + K)
        keys = _slabs(place, ((t >= base - start) & (t < length))[:, None], K)
        passed, whole = tl.full((G,), 1.0, tl.float32), 1.0
        for i in range(G):
            now = first + i
            member = (now >= base - start) & (now < length)
            fade = tl.load(kept_decay + _line(line_0 + now, lines) * HV, mask=member, other=1.0)
            passed, whole = tl.where(j < i, passed * fade, passed), whole * fade
            if member & (now >= 0):
                token = heads + now * WIDTH
                of_q, of_k = _dot(keys, _slabs(token, True, K)), _dot(keys, _slabs(token + K, True, K))
                token += 2 * K + 2 * V
                tl.store(token + j, tl.where(j < i, of_k * passed, 0.0))
                tl.store(token + G + j, tl.where(j <= i, of_q * passed, 0.0))
                tl.store(token + 2 * G + 1, whole)
        tl.store(ends + j, passed)
        tl.store(ends + G, whole)
        ends += 2 * G


@triton.jit
def _token(
    state, us, token, kept, v, inside,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """u of one new token, for a block of V, from the state before its cell and the cell's us."""
    of_q, of_k = _dot(state, _slabs(token, True, K)), _dot(state, _slabs(token + K, True, K))
    value = tl.load(token + 2 * K + v, mask=inside, other=0.0)
    weights = token + 2 * K + 2 * V
    rate, whole = tl.load(weights + 2 * G), tl.load(weights + 2 * G + 1)
    seen, o = of_k * whole, of_q * whole
    for j in tl.static_range(len(us)):
        seen = _fma(us[j], tl.load(weights + j), seen)
        o = _fma(us[j], tl.load(weights + G + j), o)
    u = (value - seen) * rate
    o = _fma(u, tl.load(weights + G + len(us)), o)
    tl.store(kept + v, u, mask=inside)
    tl.store(token + 2 * K + V + v, o, mask=inside)
    return u


@triton.jit
def _advance(
    state, us, heads, kept_k, ends, first, begin, line_0, lines,
    HK: tl.constexpr, K: tl.constexpr, G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The state behind a whole cell: decayed, and the cell's tokens written, one after another."""
    whole = tl.load(ends + G)
    done = (state[0] * whole,)
    for r in tl.static_range(1, len(state)):
        done = done + (state[r] * whole,)
    for j in tl.static_range(G):
        t, decay = first + j, tl.load(ends + j)
        old = kept_k + _line(line_0 + t, lines) * (HK * K)
        key = _slabs(tl.where(t < 0, old, heads + t * WIDTH + K), t >= begin, K)
        last, u = done, us[j][:, None]
        done = (_fma(u, key[0] * decay, last[0]),)
        for r in tl.static_range(1, len(state)):
            done = done + (_fma(u, key[r] * decay, last[r]),)
    return done


@triton.jit
def _values(
    state, place, heads, kept_k, kept_u, ends, v, base, start, length, line_0, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A block of V from cell to cell: u and o of new tokens, the state where a cell is committed."""
    inside, begin = v < V, base - start
    for cell in range(base // G, (start + length - 1) // G + 1):
        first = cell * G - start
        us = ()
        for i in tl.static_range(G):
            t = first + i
            kept = kept_u + _line(line_0 + t, lines) * (HV * V)
            u = tl.load(kept + v, mask=inside & (t >= begin) & (t < 0), other=0.0)
            if (t >= 0) & (t < length):
                u = _token(state, us, heads + t * WIDTH, kept, v, inside, K, V, G)
            us = us + (u,)
        if first + G < length:
            state = _advance(
                state, us, heads, kept_k, ends, first, begin, line_0, lines, HK, K, G, WIDTH
            )
            if (first + G <= 0) & (first + 2 * G > 0):
                for r in tl.static_range(len(state)):
                    at = r * SLAB + tl.arange(0, SLAB)[None, :]
                    tl.store(place + at, state[r], mask=inside[:, None] & (at < K))
        ends += 2 * G


@triton.jit
def _norm_and_gate(
    heads, z, out, weight, length, z_stride, eps,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """o / rms * weight * silu(z), for TOKENS new tokens at a time."""
    j = tl.arange(0, BLOCK_V)[None, :]
    weight = tl.load(weight + j, mask=j < V, other=0.0).to(tl.float32)
    for begin in range(0, length, TOKENS):
        t = begin + tl.arange(0, TOKENS)[:, None]
        inside = (t < length) & (j < V)
        o = tl.load(heads + t * WIDTH + 2 * K + V + j, mask=inside, other=0.0)
        gate = tl.load(z + t * z_stride + j, mask=inside, other=0.0).to(tl.float32)
        o = o * tl.rsqrt(fold(o * o) / V + eps)[:, None] * weight
        o = o * (gate / (1.0 + tl.exp(-gate)))
        tl.store(out + t * (HV * V) + j, o.to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["length", "lines", "eps", "b_stride", "a_stride", "cells"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts", "pending"],
)
def _step_kernel(
    mixed, z, b, a, taps, a_log, dt_bias, norm, recurrent, conv, kept_u, kept_k, kept_decay,
    slots, starts, pending, heads, ends, out, length, lines, cells, eps,
    mixed_stride, z_stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, VALUES: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, value head): the inputs, what tokens of a cell take of each other, the state."""
    program = tl.program_id(0).to(tl.int64)
    s, h = program // HV, (program % HV).to(tl.int32)
    slot = tl.load(slots + s).to(tl.int64)
    start, count = tl.load(starts + s).to(tl.int32), tl.load(pending + s).to(tl.int32)
    v = tl.arange(0, VALUES)
    place = recurrent + (slot * HV + h) * (V * K) + v[:, None] * K
    state = _slabs(place, v[:, None] < V, K)
    base, line_0, token = start - count, start % lines, s * length
    mixed += token * mixed_stride
    conv += slot * lines * (2 * HK * K + HV * V)
    kept_k += slot * lines * (HK * K)
    kept_u += slot * lines * (HV * V) + h * V
    kept_decay += slot * lines * HV + h
    heads += program * length * WIDTH
    ends += program * cells * (2 * G)
    _inputs(
        mixed, b + token * b_stride + h, a + token * a_stride + h, conv, taps,
        tl.load(a_log + h), tl.load(dt_bias + h), kept_k, kept_decay, heads, line_0, length, lines,
        mixed_stride, b_stride, a_stride, h,
        HK, HV, K, V, R, G, BLOCK_K, BLOCK_V, TOKENS, WIDTH, L2_EPS,
    )  # fmt: skip
    tl.debug_barrier()  # heads are written
    kept_k += h // (HV // HK) * K
    _cell_weights(
        heads, kept_k, kept_decay, ends, base, start, length, line_0, lines, HK, HV, K, V, G, WIDTH
    )
    tl.debug_barrier()  # weights are written
    for begin in range(0, V, VALUES):
        after = v + (begin + VALUES)
        following = _slabs(place + VALUES * K, after[:, None] < V, K)
        _values(
            state, place, heads, kept_k, kept_u, ends, v + begin, base, start, length, line_0,
            lines, HK, HV, K, V, G, WIDTH,
        )  # fmt: skip
        state, place = following, place + VALUES * K
    tl.debug_barrier()  # o is written
    _norm_and_gate(
        heads, z + token * z_stride + h * V, out + (token * HV + h) * V, norm, length, z_stride,
        eps, HV, K, V, BLOCK_V, TOKENS, WIDTH,
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


def layout_of(sizes: dict[str, int], rows: int, length: int) -> dict[str, int]:
    """Tiles: VALUES of V and TOKENS new tokens at a time. No bit depends on them."""
    blocks = blocks_of(sizes, 128)
    tokens = min(4, triton.next_power_of_2(length))
    return dict(**blocks, VALUES=min(blocks["BLOCK_V"], 32), TOKENS=tokens, num_warps=4)


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
    lines, width = state.conv.shape[1], 2 * k + 2 * v + 2 * flush + PAD
    cells = lines // flush + 2
    scratch = dict(dtype=torch.float32, device=mixed.device)
    heads = torch.empty(rows * hv, length, width, **scratch)
    ends = torch.empty(rows * hv, cells, 2 * flush, **scratch)
    mixed, z, b, a = _flat(mixed), _flat(z), b.flatten(0, 1), a.flatten(0, 1)
    _step_kernel[(rows * hv,)](
        mixed, z, b, a, weights.conv.t().contiguous(), weights.a_log, weights.dt_bias, weights.norm,
        state.recurrent, state.conv, state.u, state.k, state.decay, slots, starts, pending,
        heads, ends, out, length, lines, cells, weights.eps,
        mixed.stride(0), z.stride(0), b.stride(0), a.stride(0),
        **sizes, R=weights.conv.shape[1] - 1, G=flush, WIDTH=width, L2_EPS=L2_EPS,
        **layout_of(sizes, rows, length), enable_fp_fusion=False, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out
