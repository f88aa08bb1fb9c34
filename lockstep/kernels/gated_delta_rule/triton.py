"""gated_delta_step in Triton: the state is read once, and written at most once.

A warp owns VI columns of the state and all of K, so sums over K stay inside it. Tokens, window and
ring length are run-time values; a window's length chooses only how many inputs are made, and how
many are brought near, at once. Few tokens take one kernel, in which a program does a value head's
whole mixer; many take three, of which the one that walks through the state has no barrier. Sums
have one tree in both.
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
    fold,
    inputs,
    inputs_kernel,
    line_of,
    near,
    sizes_of,
    supports,
)

MOST_REGISTERS = 128
"""Of a thread: two programs of 8 warps share a multiprocessor, 128 KB of state in flight."""
ALIGNED = 16
PAD = 4
"""Floats behind a token's q, k and v in the scratch: decay, beta, and two to keep lines aligned."""
ONE_TREE = triton.__version__.startswith("3.6.") or triton.knobs.runtime.interpret
"""Whether both forms add K's lanes in one order, which is the compiler's. Triton 3.6 keeps K inside
a warp in both; 3.8 spreads it over warps, by another order in each."""
APART, PARTS = 8 if ONE_TREE else 1 << 30, 4
"""From so many tokens on, inputs and norm have kernels of their own, and a head's columns are
walked by so many programs. H200, 48 heads of 128 x 128, us in one kernel and in three: a row of 1,
4 and 8 tokens 8.3 and 8.9, 12.0 and 11.7, 17.4 and 15.3; 8 rows of one 22.3 and 20.8, 64 rows 119
and 86."""
MOST_TOKENS, HEADS, NORM_WARPS = 4, 8, 4
"""Window tokens whose inputs are made at once; heads and warps of a norm program: 3.1 us for 64
rows of 4 tokens, 3.4 with 4 heads, 8.5 with programs of one head and warp."""
TOUCH, NEAR, SECTOR = 8, 4, 8
"""Pending tokens that are asked for early, into L2 in one kernel and into L1 in three, where it is
twice as many for longer windows; and floats that come with one. 64 rows of 1 and 4 tokens: 5 and 7
us less than into L2; of 8 tokens 205 us with 4 and 195 with 8."""


@triton.jit
def _fma(x, y, z):
    return tl.fma(tl.broadcast_to(x, z.shape), tl.broadcast_to(y, z.shape), z)


@triton.jit
def _slices(
    place, live, step,
    N: tl.constexpr, KT: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """N slices of KT of the K rows, `step` apart: a tuple, so that addresses are constants.

    What is read ONCE is the first to leave the caches.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    kt = tl.arange(0, KT)[:, None, None]
    x = (tl.load(place, mask=live & (kt < K), other=0.0, eviction_policy=POLICY),)
    for r in tl.static_range(1, N):
        mask = live & (kt + r * KT < K)
        x = x + (tl.load(place + r * step, mask=mask, other=0.0, eviction_policy=POLICY),)
    return x


@triton.jit
def _sum_k(x, state):
    """x S: slices [KT, 1, 1], [KT, VB, VI] -> [1, VB, VI]: a lane's own KR, then the KT lanes."""
    total = x[0] * state[0]
    for r in tl.static_range(1, len(state)):
        total = _fma(x[r], state[r], total)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def _write(state, fade, k, u):
    """The decay and the rank-1 update: the one expression of stepping and replay."""
    new = (_fma(k[0], u, state[0] * fade),)
    for r in tl.static_range(1, len(state)):
        new = new + (_fma(k[r], u, state[r] * fade),)
    return new


@triton.jit
def _store_v(place, x, kt, inside):
    """Stores x [1, VB, VI], which all KT lanes hold, from the first of them as it lies."""
    place, first = place + tl.zeros_like(kt), inside & (kt == 0)
    tl.store(place, tl.broadcast_to(x, place.shape).to(place.dtype.element_ty), mask=first)


@triton.jit
def _after(line, lines):
    return tl.where(line + 1 == lines, 0, line + 1)


@triton.jit
def _touch(
    kept_k, kept_u, first, line, count, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Asks for the last pending tokens' k and u, which replay reads a turn ahead only."""
    n, k, v = tl.arange(0, MOST)[:, None], tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)
    line, v = line_of(line - 1 - n, lines), first + v[None, :]
    live = n < count
    tl.load(kept_k + line * (HK * K) + k, mask=live & (k < K), other=0.0, volatile=True)
    tl.load(kept_u + line * (HV * V) + v, mask=live & (v < V), other=0.0, volatile=True)


@triton.jit
def _kept(
    kept_k, kept_u, kept_decay, kt, j, in_v, line,
    KR: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A line of the rings: decay, k and u. Never masked, so one behind the last may be read."""
    k = _slices(kept_k + line * (HK * K) + kt, True, kt.shape[0], KR, kt.shape[0], K)
    u = tl.load(kept_u + line * (HV * V) + j, mask=in_v, other=0.0)
    return tl.load(kept_decay + line * HV), k, u


@triton.jit
def _replay(
    state, kept_k, kept_u, kept_decay, kt, j, in_v, line, count, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The state after `count` tokens out of the rings; the next two are on their way.

    Two tokens a turn, so that nothing that was read is moved.
    """
    KR: tl.constexpr = len(state)
    fade_a, k_a, u_a = _kept(kept_k, kept_u, kept_decay, kt, j, in_v, line, KR, HK, HV, K, V)
    line = _after(line, lines)
    fade_b, k_b, u_b = _kept(kept_k, kept_u, kept_decay, kt, j, in_v, line, KR, HK, HV, K, V)
    for n in range(0, count, 2):
        state, line = _write(state, fade_a, k_a, u_a), _after(line, lines)
        fade_a, k_a, u_a = _kept(kept_k, kept_u, kept_decay, kt, j, in_v, line, KR, HK, HV, K, V)
        if n + 1 < count:
            state = _write(state, fade_b, k_b, u_b)
        line = _after(line, lines)
        fade_b, k_b, u_b = _kept(kept_k, kept_u, kept_decay, kt, j, in_v, line, KR, HK, HV, K, V)
    return state


@triton.jit
def _gated_norm(o, z, weight, eps, V: tl.constexpr):
    """o [n, VB, VI] / rms * weight * silu(z)."""
    square = fold(tl.reshape(o * o, (o.shape[0], o.shape[1] * o.shape[2])))[:, None, None]
    z = z.to(tl.float32)
    return o * tl.rsqrt(square / V + eps) * weight * (z / (1.0 + tl.exp(-z)))


@triton.jit
def _window(
    state, of_q, of_k, of_v, of_gates, width, z, out, kept_u, kt, j, in_v, weight, line, length,
    lines, z_stride, eps, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The new tokens, one after another. What a token needs first is asked for a turn ahead."""
    KT: tl.constexpr = kt.shape[0]
    KR: tl.constexpr = len(state)
    k = _slices(of_k + kt, True, KT, KR, KT, K)
    v = tl.load(of_v + j, mask=in_v, other=0.0)
    fade, rate = tl.load(of_gates), tl.load(of_gates + 1)
    for t in range(length):
        next_t = tl.minimum(t + 1, length - 1) * width
        q = _slices(of_q + t * width + kt, True, KT, KR, KT, K)
        if NORM:
            gate = tl.load(z + t * z_stride + j, mask=in_v, other=0.0)
        u = (v - _sum_k(k, state) * fade) * rate
        state = _write(state, fade, k, u)
        k = _slices(of_k + next_t + kt, True, KT, KR, KT, K)
        v = tl.load(of_v + next_t + j, mask=in_v, other=0.0)
        fade, rate = tl.load(of_gates + next_t), tl.load(of_gates + next_t + 1)
        o = _sum_k(q, state)
        if NORM:
            o = _gated_norm(o, gate, weight, eps, V)
        _store_v(out + t * (HV * V) + j, o, kt, in_v)
        _store_v(kept_u + line * (HV * V) + j, u, kt, in_v)
        line = _after(line, lines)


@triton.jit
def _committed(
    state, place, kept_k, kept_u, kept_decay, kt, j, in_v, line, count, lines, flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The state after the pending tokens; written where there are at least `flush` of them."""
    KT: tl.constexpr = kt.shape[0]
    line = line_of(line - count, lines)
    state = _replay(
        state, kept_k, kept_u, kept_decay, kt, j, in_v, line, count, lines, HK, HV, K, V
    )
    if count >= flush:
        for r in tl.static_range(len(state)):
            tl.store(place + r * (KT * V), state[r], mask=(kt + r * KT < K) & in_v)
    return state


@triton.jit(
    do_not_specialize=["length", "lines", "flush", "eps", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "slots", "starts", "pending"],
)
def _whole_kernel(
    mixed, z, b, a, taps, a_log, dt_bias, norm, recurrent, conv, kept_u, kept_k, kept_decay,
    slots, starts, pending, heads, out, length, lines, flush, eps,
    stride, z_stride, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    KT: tl.constexpr, KR: tl.constexpr, VB: tl.constexpr, VI: tl.constexpr, TOKENS: tl.constexpr,
    PAD: tl.constexpr, TOUCH: tl.constexpr, L2_EPS: tl.constexpr,
):  # fmt: skip
    """One (row, value head): ask for the state, make the inputs, replay, write, step, norm."""
    program = tl.program_id(0).to(tl.int64)
    s, h = program // HV, (program % HV).to(tl.int32)
    kh, token, width = h // (HV // HK), s * length, 2 * K + V + PAD
    kt = tl.arange(0, KT)[:, None, None]
    j = (tl.arange(0, VB) * VI)[None, :, None] + tl.arange(0, VI)[None, None, :]
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    log_rate, bias = tl.load(a_log + h), tl.load(dt_bias + h)
    slot = tl.load(slots + s).to(tl.int64)
    start, count = tl.load(starts + s).to(tl.int32), tl.load(pending + s).to(tl.int32)
    place = recurrent + (slot * HV + h) * (K * V) + kt * V + j
    state, line = _slices(place, j < V, KT * V, KR, KT, K), start % lines
    kept_k += slot * lines * (HK * K)
    kept_u += slot * lines * (HV * V) + h * V
    kept_decay += slot * lines * HV + h
    _touch(kept_k + kh * K, kept_u, 0, line, count, lines, HK, HV, K, V, KR * KT, VB * VI, TOUCH)
    heads += program * length * width
    of_v = heads + 2 * K
    inputs(
        mixed + token * stride, b, a, taps, log_rate, bias,
        conv + slot * lines * (2 * HK * K + HV * V), kept_k, kept_decay,
        heads, heads + K, of_v, of_v + V, h, token, line, length, lines, stride, b_stride,
        a_stride, width, HK, HV, K, V, R, KR * KT, VB * VI, TOKENS, L2_EPS,
    )  # fmt: skip
    state = _committed(
        state, place, kept_k + kh * K, kept_u, kept_decay, kt, j, j < V, line, count, lines, flush,
        HK, HV, K, V,
    )  # fmt: skip
    tl.debug_barrier()  # heads are written
    _window(
        state, heads, heads + K, of_v, of_v + V, width, z + token * z_stride + h * V,
        out + (token * HV + h) * V, kept_u, kt, j, j < V, weight, line, length, lines, z_stride,
        eps, HV, K, V, True,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["length", "lines", "flush"],
    do_not_specialize_on_alignment=["slots", "starts", "pending"],
)
def _walk_kernel(
    recurrent, kept_u, kept_k, kept_decay, slots, starts, pending, heads, o, length, lines, flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KT: tl.constexpr, KR: tl.constexpr, VB: tl.constexpr, VI: tl.constexpr, NEAR: tl.constexpr,
    SECTOR: tl.constexpr,
):  # fmt: skip
    """One (row, value head, VB * VI columns): replay, write, step, on inputs made before."""
    C: tl.constexpr = 2 * HK * K + HV * V
    program, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * (VB * VI)
    s, h = program // HV, (program % HV).to(tl.int32)
    kh, token, width = h // (HV // HK), s * length, C + 2 * HV
    kt = tl.arange(0, KT)[:, None, None]
    j = first + (tl.arange(0, VB) * VI)[None, :, None] + tl.arange(0, VI)[None, None, :]
    in_v = tl.full(j.shape, True, tl.int1) if V % (VB * VI) == 0 else j < V
    slot = tl.load(slots + s).to(tl.int64)
    start, count = tl.load(starts + s).to(tl.int32), tl.load(pending + s).to(tl.int32)
    place = recurrent + (slot * HV + h) * (K * V) + kt * V + j
    state, line = _slices(place, in_v, KT * V, KR, KT, K, True), start % lines
    kept_k += slot * lines * (HK * K) + kh * K
    kept_u += slot * lines * (HV * V) + h * V
    kept_decay += slot * lines * HV + h
    heads += token * width
    near(
        kept_k, kept_u, heads + kh * K, heads + (HK + kh) * K, heads + 2 * HK * K + h * V, width,
        first, line, count, lines, length, HK, HV, K, V, KR * KT, VB * VI, NEAR, SECTOR,
    )  # fmt: skip
    state = _committed(
        state, place, kept_k, kept_u, kept_decay, kt, j, in_v, line, count, lines, flush,
        HK, HV, K, V,
    )  # fmt: skip
    _window(
        state, heads + kh * K, heads + (HK + kh) * K, heads + 2 * HK * K + h * V,
        heads + C + 2 * h, width, o, o + (token * HV + h) * V, kept_u, kt, j, in_v, 0.0, line,
        length, lines, 0, 0.0, HV, K, V, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "eps"])
def _norm_kernel(
    o, z, norm, out, heads, z_stride, eps,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gated norm of some heads' outputs."""
    n = (tl.program_id(0) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    j = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (n < heads) & (j < V)
    weight = tl.load(norm + j, mask=j < V, other=0.0).to(tl.float32)
    gate = tl.load(z + n // HV * z_stride + n % HV * V + j, mask=mask, other=0.0)
    x = _gated_norm(tl.load(o + n * V + j, mask=mask, other=0.0), gate, weight, eps, V)
    tl.store(out + n * V + j, x.to(out.dtype.element_ty), mask=mask)


def layout_of(sizes: dict[str, int]) -> dict[str, int]:
    """How the state lies in a program's registers: KR x KT rows, VB warps of VI columns.

    A lane holds 4 neighbours of VI, so VI / 4 x KT lanes make a warp. There are more lanes than K
    and than V, or else the compiler takes vectors over shared memory. 1 to 8 warps.
    """
    k, v = blocks_of(sizes, 128).values()
    warps = min(max(k, v) // 16, v // 4)
    columns = v // warps
    lanes = max(1, min(k, 128 // columns))
    return dict(KR=k // lanes, KT=lanes, VB=warps, VI=columns)


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
    (rows, length, channels), sizes = mixed.shape, sizes_of(state)
    hk, hv, k, v = (sizes[n] for n in ("HK", "HV", "K", "V"))
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    mixed, z, b, a = _flat(mixed), _flat(z), b.flatten(0, 1), a.flatten(0, 1)
    taps, lines = weights.conv.t().contiguous(), state.conv.shape[1]
    strides = mixed.stride(0), b.stride(0), a.stride(0)
    f32 = dict(dtype=torch.float32, device=mixed.device)
    exact = dict(**sizes, enable_fp_fusion=False)
    blocks = blocks_of(sizes, 128)
    layout, into = layout_of(sizes), dict(R=len(taps) - 1, L2_EPS=L2_EPS, **exact)
    if rows * length < APART:
        heads = torch.empty(rows * hv, length, 2 * k + v + PAD, **f32)
        _whole_kernel[(rows * hv,)](
            mixed, z, b, a, taps, weights.a_log, weights.dt_bias, weights.norm,
            state.recurrent, state.conv, state.u, state.k, state.decay, slots, starts, pending,
            heads, out, length, lines, flush, weights.eps,
            strides[0], z.stride(0), *strides[1:], **layout, PAD=PAD, TOKENS=MOST_TOKENS,
            TOUCH=TOUCH, **into, num_warps=layout["VB"], maxnreg=MOST_REGISTERS,
        )  # fmt: skip
        return out
    heads, o = torch.empty(rows, length, channels + 2 * hv, **f32), torch.empty(out.shape, **f32)
    tokens, warps = min(MOST_TOKENS, triton.next_power_of_2(length)), layout["VB"] // PARTS or 1
    inputs_kernel[(rows, 2 * hk + hv)](
        mixed, b, a, taps, weights.a_log, weights.dt_bias, state.conv, state.k, state.decay,
        slots, starts, heads, length, lines, *strides,
        **blocks, TOKENS=tokens, **into, num_warps=1,
    )  # fmt: skip
    _walk_kernel[(rows * hv, triton.cdiv(v, warps * layout["VI"]))](
        state.recurrent, state.u, state.k, state.decay, slots, starts, pending, heads, o,
        length, lines, flush, **{**layout, "VB": warps}, SECTOR=SECTOR,
        NEAR=NEAR if length <= NEAR else 2 * NEAR,
        **exact, num_warps=warps, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    _norm_kernel[(triton.cdiv(rows * length * hv, HEADS),)](
        o, z, weights.norm, out, rows * length * hv, z.stride(0), weights.eps,
        HV=hv, V=v, BLOCK_V=blocks["BLOCK_V"], HEADS=HEADS,
        num_warps=NORM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
