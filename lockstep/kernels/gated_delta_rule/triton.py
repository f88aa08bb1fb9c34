"""gated_delta_step in Triton: one program per row and value head does the whole mixer, once.

A cell is `flush` tokens from a multiple of it. What a token takes is the state before its cell and
what the tokens before it in its cell wrote, each by a weight of its own. So the state is read once,
multiplied once by all of the window's k and q on tensor cores, and written where a cell ends. Rows,
tokens, window and ring length are run-time values, and a token's place in a tile is its place in its
cell: so single steps, windows and replay share their bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaState,
    GatedDeltaWeights,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.triton_inputs import (
    blocks_of,
    inputs,
    line_of,
    sizes_of,
    supports,
)

MOST_REGISTERS = 128
"""Of a thread: two programs of 8 warps share a multiprocessor, 128 KB of state in flight."""
MOST_TOKENS = 4
"""Of the window whose inputs are made at once. No bit depends on it."""
ALIGNED = 16
PAD = 4
"""Floats behind a token's q, k and v in the scratch: beta, and three to keep lines aligned."""


@triton.jit
def _times(x, y):
    return x * y


@triton.jit
def _keys(
    heads, kept_k, first, begin, length, line_0, lines,
    HK: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """[2 H, BLOCK]: a cell's G ks, pending and new, and from H on its new qs."""
    n, i = tl.arange(0, 2 * H)[:, None], tl.arange(0, BLOCK)[None, :]
    t, live = first + n % H, (n % H < G) & (i < K)
    held = kept_k + line_of(line_0 + t, lines) * (HK * K) + i
    old = tl.load(held, mask=live & (n < H) & (t >= begin) & (t < 0), other=0.0)
    new = heads + t * WIDTH + (1 - n // H) * K + i
    return tl.where(t < 0, old, tl.load(new, mask=live & (t >= 0) & (t < length), other=0.0))


@triton.jit
def _decays(
    kept_decay, first, begin, length, line_0, lines,
    HV: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """[2 H, 2 H]: the decay to place n % H of a cell, from its token j or, at 2 H - 1, start."""
    i = tl.arange(0, H)
    t = first + i
    live = (i < G) & (t >= begin) & (t < length)
    fade = tl.load(kept_decay + line_of(line_0 + t, lines) * HV, mask=live, other=1.0)
    n, j = tl.arange(0, 2 * H)[:, None, None], tl.arange(0, 2 * H)[None, :, None]
    i = i[None, None, :]
    on_the_way = (i > tl.where(j == 2 * H - 1, -1, j)) & (i <= n % H)
    return tl.reduce(tl.where(on_the_way, fade[None, None, :], 1.0), 2, _times)


@triton.jit
def _weights(x, passed, weights, H: tl.constexpr, PRECISION: tl.constexpr):
    """What delta and, from H on, output take of the us, and at 2 H - 1 of S: [2 H, 2 H]."""
    n, j = tl.arange(0, 2 * H)[:, None], tl.arange(0, 2 * H)[None, :]
    alike = tl.dot(x, tl.trans(x), input_precision=PRECISION)
    takes = tl.where(j < n % H + n // H, alike * passed, 0.0)
    tl.store(weights + n * (2 * H) + j, tl.where(j == 2 * H - 1, passed, takes))


@triton.jit
def _solve(
    seen, us, weights, values, begin, end,
    V: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """u and o of a cell's tokens begin .. end, columns n and H + n of [BLOCK, 2 H].

    seen: S k and S q, decayed; us: those of the tokens before.
    """
    v, n = tl.arange(0, BLOCK), tl.arange(0, 2 * H)
    outs = tl.zeros(us.shape, tl.float32)
    for i in range(begin, end):
        of_k = tl.load(weights + i * (2 * H) + n)[None, :]
        of_q = tl.load(weights + (H + i) * (2 * H) + n)[None, :]
        value = tl.load(values + (i - begin) * WIDTH + v, mask=v < V, other=0.0)
        rate = tl.load(values + (i - begin) * WIDTH + V)
        u = (value - tl.sum(tl.where(n[None, :] == i, seen, us * of_k), 1)) * rate
        us = tl.where(n[None, :] == i, u[:, None], us)
        o = tl.sum(tl.where(n[None, :] == H + i, seen, us * of_q), 1)
        outs = tl.where(n[None, :] == H + i, o[:, None], outs)
    return us, outs


@triton.jit
def _lines_of(x):
    """[n, 2 H], one half of it 0 -> [H, n]."""
    return tl.trans(tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1))


@triton.jit
def _finish(
    us, outs, gate, weight, out, kept_u, first, length, line_0, lines, eps,
    HV: tl.constexpr, V: tl.constexpr, G: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keeps the new us; writes o / rms * weight * silu(gate), gate [H, BLOCK]."""
    n, v = tl.arange(0, H)[:, None], tl.arange(0, BLOCK)[None, :]
    t = first + n
    new = (n < G) & (t >= 0) & (t < length) & (v < V)
    tl.store(kept_u + line_of(line_0 + t, lines) * (HV * V) + v, _lines_of(us), mask=new)
    x, gate = _lines_of(outs), gate.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * weight * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + t * (HV * V) + v, x.to(out.dtype.element_ty), mask=new)


@triton.jit
def _advance(
    state, heads, kept_k, kept_u, kept_decay, first, begin, line_0, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The state [BLOCK_V, BLOCK_K] behind a whole cell: decayed, and its tokens written."""
    v, k, low = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K), tl.maximum(begin - first, 0)
    whole = 1.0
    for i in tl.static_range(G):
        t = first + i
        whole *= tl.load(kept_decay + line_of(line_0 + t, lines) * HV, mask=t >= begin, other=1.0)
    state, decay, t = state * whole, 1.0, first + G - 1
    line = line_of(line_0 + t, lines)
    place = tl.where(t < 0, kept_k + line * (HK * K), heads + t * WIDTH + K)
    key = tl.load(place + k, mask=k < K, other=0.0)
    u = tl.load(kept_u + line * (HV * V) + v, mask=v < V, other=0.0)
    fade = tl.load(kept_decay + line * HV)
    for _ in range(low, G):
        now_key, now_u, now_fade = key * decay, u, fade
        t -= 1
        line, live = line_of(line_0 + t, lines), t >= first + low
        place = tl.where(t < 0, kept_k + line * (HK * K), heads + t * WIDTH + K)
        key = tl.load(place + k, mask=(k < K) & live, other=0.0)
        u = tl.load(kept_u + line * (HV * V) + v, mask=(v < V) & live, other=0.0)
        fade = tl.load(kept_decay + line * HV, mask=live, other=1.0)
        column, row = now_u[:, None], now_key[None, :]
        column, row = tl.broadcast_to(column, state.shape), tl.broadcast_to(row, state.shape)
        state, decay = tl.fma(column, row, state), decay * now_fade
    return state


@triton.jit
def _cell(
    state, place, inside, heads, weights, kept_u, kept_k, kept_decay, z, out, norm, cell, done,
    start, begin, length, line_0, lines, z_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A cell's new tokens, given the state before cell `done`.

    What is between is written into it, and the state is kept where all of that is committed.
    """
    first = cell * G - start
    n, j = tl.arange(0, 2 * H)[:, None], tl.arange(0, BLOCK_V)[None, :]
    held = kept_u + line_of(line_0 + first + n, lines) * (HV * V) + j
    live = (n < G) & (first + n >= begin) & (first + n < 0) & (j < V)
    us = tl.load(held, mask=live, other=0.0)
    n = tl.arange(0, H)[:, None]
    live = (n < G) & (first + n >= 0) & (first + n < length) & (j < V)
    gate = tl.load(z + (first + n) * z_stride + j, mask=live, other=0.0)
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    x = _keys(heads, kept_k, first, begin, length, line_0, lines, HK, K, G, H, BLOCK_K, WIDTH)
    passed = _decays(kept_decay, first, begin, length, line_0, lines, HV, G, H)
    _weights(x, passed, weights, H, PRECISION)
    tl.debug_barrier()  # weights are written, and us of the cell before
    if done < cell:
        for at in range(done, cell):
            state = _advance(
                state, heads, kept_k, kept_u, kept_decay, at * G - start, begin, line_0, lines,
                HK, HV, K, V, G, BLOCK_K, BLOCK_V, WIDTH,
            )  # fmt: skip
            lines_of = tl.reshape(state, place.shape)
            tl.store(place, lines_of, mask=inside & (at * G + G <= start))
    now = tl.maximum(first, 0)
    carried = state
    for _ in range(tl.minimum(length, 1)):  # once: what a loop carries is waited for in the loop
        whole = tl.load(weights + tl.arange(0, 2 * H) * (2 * H) + 2 * H - 1)
        seen = tl.dot(carried, tl.trans(x), input_precision=PRECISION) * whole[None, :]
        new, outs = _solve(
            seen, tl.trans(us), weights, heads + now * WIDTH + 2 * K,
            now - first, tl.minimum(G, length - first), V, H, BLOCK_V, WIDTH,
        )  # fmt: skip
        _finish(
            new, outs, gate, weight, out, kept_u, first, length, line_0, lines, eps,
            HV, V, G, H, BLOCK_V,
        )  # fmt: skip
        carried = tl.zeros_like(state)


@triton.jit(
    do_not_specialize=["length", "lines", "eps", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts", "pending"],
)
def _step_kernel(
    mixed, z, b, a, taps, a_log, dt_bias, norm, recurrent, conv, kept_u, kept_k, kept_decay,
    slots, starts, pending, heads, weights, out, length, lines, eps,
    mixed_stride, z_stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, value head): the state is asked for, then cell by cell its inputs and results."""
    program = tl.program_id(0).to(tl.int64)
    s, h = program // HV, (program % HV).to(tl.int32)
    slot = tl.load(slots + s).to(tl.int64)
    start, count = tl.load(starts + s).to(tl.int32), tl.load(pending + s).to(tl.int32)
    v_0, v = (tl.arange(0, BLOCK_V // 8) * 8)[:, None, None], tl.arange(0, 8)[None, :, None]
    k = tl.arange(0, BLOCK_K)[None, None, :]
    place = recurrent + (slot * HV + h) * (V * K) + v * K + k + v_0 * K
    inside = (v_0 + v < V) & (k < K)
    state = tl.reshape(tl.load(place, mask=inside, other=0.0), (BLOCK_V, BLOCK_K))
    line_0, begin, token = start % lines, -count, s * length
    mixed += token * mixed_stride
    z += token * z_stride + h * V
    b, a = b + token * b_stride + h, a + token * a_stride + h
    out += (token * HV + h) * V
    conv += slot * lines * (2 * HK * K + HV * V)
    kept_k += slot * lines * (HK * K)
    kept_u += slot * lines * (HV * V) + h * V
    kept_decay += slot * lines * HV + h
    heads += program * length * WIDTH
    weights += program * (4 * H * H)
    inputs(
        mixed, b, a, conv, taps, tl.load(a_log + h), tl.load(dt_bias + h), kept_k, kept_decay,
        heads, line_0, length, lines, mixed_stride, b_stride, a_stride, h,
        HK, HV, K, V, R, max(BLOCK_K, BLOCK_V), TOKENS, WIDTH, L2_EPS,
    )  # fmt: skip
    kept_k += h // (HV // HK) * K
    tl.debug_barrier()  # heads and decays are written
    cell, last = start // G, (start + length - 1) // G
    _cell(
        state, place, inside, heads, weights, kept_u, kept_k, kept_decay, z, out, norm,
        cell, (start - count) // G, start, begin, length, line_0, lines, z_stride, eps,
        HK, HV, K, V, G, H, BLOCK_K, BLOCK_V, WIDTH, PRECISION,
    )  # fmt: skip
    if TOKENS > 1 and cell < last:
        for following in range(cell + 1, last + 1):
            tl.debug_barrier()  # weights are read, the state before `cell` is written
            state = tl.reshape(tl.load(place, mask=inside, other=0.0), (BLOCK_V, BLOCK_K))
            _cell(
                state, place, inside, heads, weights, kept_u, kept_k, kept_decay, z, out, norm,
                following, cell, start, begin, length, line_0, lines, z_stride, eps,
                HK, HV, K, V, G, H, BLOCK_K, BLOCK_V, WIDTH, PRECISION,
            )  # fmt: skip


def precision_of(dtype: torch.dtype) -> str:
    """Of products with the state: as of the prompt law (lockstep...triton_chunk)."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def warps_of(blocks: dict[str, int]) -> int:
    """64 floats of state a thread; no bit depends on it."""
    return min(8, max(1, blocks["BLOCK_K"] * blocks["BLOCK_V"] // 2048))


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
    hv, k, v, blocks = sizes["HV"], sizes["K"], sizes["V"], blocks_of(sizes, 128)
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    half, width = max(8, flush), 2 * k + v + PAD
    scratch = dict(dtype=torch.float32, device=mixed.device)
    heads = torch.empty(rows * hv, length, width, **scratch)
    takes = torch.empty(rows * hv, 2 * half, 2 * half, **scratch)
    mixed, z, b, a = _flat(mixed), _flat(z), b.flatten(0, 1), a.flatten(0, 1)
    _step_kernel[(rows * hv,)](
        mixed, z, b, a,
        weights.conv.t().contiguous(), weights.a_log, weights.dt_bias, weights.norm,
        state.recurrent, state.conv, state.u, state.k, state.decay, slots, starts, pending,
        heads, takes, out, length, state.conv.shape[1], weights.eps,
        mixed.stride(0), z.stride(0), b.stride(0), a.stride(0),
        **sizes, **blocks, R=weights.conv.shape[1] - 1, G=flush, H=half, WIDTH=width,
        TOKENS=min(MOST_TOKENS, triton.next_power_of_2(length)), PRECISION=precision_of(mixed.dtype),
        L2_EPS=L2_EPS, num_warps=warps_of(blocks), maxnreg=MOST_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
