# mypy: ignore-errors
"""gated_delta_step in Triton: the state is read once and written at most once.

Three kernels a call. inputs_kernel (_window_inputs.py) makes q, k, v, decay and beta of the
window's tokens and fills the rings. _walk_kernel holds some columns of a head's state in registers,
replays the tokens that it lacks, writes it where that is due, and steps through the window.
_norm_kernel is the gated norm. Tokens, window, ring length and flush are run-time values.

In _walk_kernel a state is a tuple of SLICES tensors [K_LANES, WARPS, COLUMNS]: a warp owns COLUMNS
values of V and all of K, so that a sum over K stays inside it; slice r holds rows r * K_LANES and
following. A tuple, so that addresses are one base and a constant. See
docs/kernels/gated_delta_rule.md, where the times are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activations._device import silu_approx
from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaWeights,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule._shared import WIDEST, blocks_of, sizes_of, supports
from lockstep.kernels.gated_delta_rule._window_inputs import bring_near, inputs_kernel
from lockstep.kernels.recurrent._rings_triton import folded_by, next_slot, wrapped
from lockstep.kernels.recurrent._sums_triton import pairwise_sum
from lockstep.kernels.recurrent.state import RecurrentState

MOST_REGISTERS = 128
"""32-bit registers of a thread: two programs of 8 warps share a multiprocessor, with 128 KB of
state in flight."""
ALIGNED = 16
"""Bytes of the widest load, and numbers between tokens that it needs."""
PARTS = 4
"""Programs that share a head's columns. H200, 48 heads of 128 x 128, 64 rows of 1 and 4 tokens:
86.4 and 142.2 us a layer, 89.7 and 142.5 with 2, 94.9 and 149.8 with 1."""
MOST_TOKENS = 4
"""Window tokens whose inputs are made at once; in windows of fewer, as many as there are."""
HEADS = 8
"""Heads of a program of the norm. H200, 64 rows of 4 tokens: 3.1 us, 3.4 with 4, 8.5 with programs
of one head and one warp."""
NORM_WARPS = 4
"""Warps of such a program."""
NEAR = 4
"""Tokens that are brought into L1 early; twice as many for windows longer than this. H200, 64 rows
of 1 and 4 tokens: 5 and 7 us less than into L2; of 8 tokens 205 us with 4 and 195 with 8."""
SECTOR = 8
"""Floats that a load of one of them brings into L1: 32 bytes."""


@triton.jit
def _fma(x, y, z):
    return tl.fma(tl.broadcast_to(x, z.shape), tl.broadcast_to(y, z.shape), z)


@triton.jit
def _load_slices(
    place, live, step,
    SLICES: tl.constexpr, K_LANES: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr = False,
):  # fmt: skip
    """A tuple of SLICES slices of K_LANES of the K rows at `place`, `step` numbers apart; fp32.

    ONCE: it is not read again, so it is the first to leave the caches.
    """
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    lane = tl.arange(0, K_LANES)[:, None, None]
    new = tl.load(place, mask=live & (lane < K), other=0.0, eviction_policy=POLICY)
    x = (new.to(tl.float32),)
    for r in tl.static_range(1, SLICES):
        mask = live & (lane + r * K_LANES < K)
        new = tl.load(place + r * step, mask=mask, other=0.0, eviction_policy=POLICY)
        x = x + (new.to(tl.float32),)
    return x


@triton.jit
def _store_slices(place, state, lane, in_v, K: tl.constexpr, V: tl.constexpr):
    """The state to memory, in its dtype there."""
    K_LANES: tl.constexpr = lane.shape[0]
    for r in tl.static_range(len(state)):
        mask = (lane + r * K_LANES < K) & in_v
        new = state[r].to(place.dtype.element_ty)
        tl.store(place + r * (K_LANES * V), new, mask=mask)


@triton.jit
def _rounded(state, DTYPE: tl.constexpr):
    """The state with numbers of its dtype in memory."""
    new = (state[0].to(DTYPE).to(tl.float32),)
    for r in tl.static_range(1, len(state)):
        new = new + (state[r].to(DTYPE).to(tl.float32),)
    return new


@triton.jit
def _sum_over_k(x, state):
    """x^T S of slices [K_LANES, 1, 1] and a state -> [1, WARPS, COLUMNS].

    A lane's own slices are added in a chain of fused multiply-adds, then the lanes.
    """
    total = x[0] * state[0]
    for r in tl.static_range(1, len(state)):
        total = _fma(x[r], state[r], total)
    return tl.sum(total, 0, keep_dims=True)


@triton.jit
def _updated(state, decay, k, u):
    """S decay + k u^T: the one expression of stepping and replay."""
    new = (_fma(k[0], u, state[0] * decay),)
    for r in tl.static_range(1, len(state)):
        new = new + (_fma(k[r], u, state[r] * decay),)
    return new


@triton.jit
def _store_columns(place, x, lane, inside):
    """Stores x [1, WARPS, COLUMNS], which all lanes of K hold, from the first of them."""
    place = place + tl.zeros_like(lane)
    first = inside & (lane == 0)
    tl.store(place, tl.broadcast_to(x, place.shape).to(place.dtype.element_ty), mask=first)


@triton.jit
def _kept(
    ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot,
    SLICES: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """decay, k and u of a token in the rings. Never masked: one behind the last may be read."""
    k = _load_slices(ring_k + ring_slot * (HK * K) + lane, True, lane.shape[0], SLICES,
                     lane.shape[0], K)  # fmt: skip
    u = tl.load(ring_u + ring_slot * (HV * V) + j, mask=in_v, other=0.0)
    return tl.load(ring_decay + ring_slot * HV), k, u


@triton.jit
def _replay(
    state, ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, count, ring_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The state after `count` tokens out of the rings, from ring_slot on; the next two are loading.

    Two tokens a turn (a and b), so that no register that was loaded is moved.
    """
    SLICES: tl.constexpr = len(state)
    decay_a, k_a, u_a = _kept(
        ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, SLICES, HK, HV, K, V
    )
    ring_slot = next_slot(ring_slot, ring_slots)
    decay_b, k_b, u_b = _kept(
        ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, SLICES, HK, HV, K, V
    )
    for n in range(0, count, 2):
        state = _updated(state, decay_a, k_a, u_a)
        ring_slot = next_slot(ring_slot, ring_slots)
        decay_a, k_a, u_a = _kept(
            ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, SLICES, HK, HV, K, V
        )
        if n + 1 < count:
            state = _updated(state, decay_b, k_b, u_b)
        ring_slot = next_slot(ring_slot, ring_slots)
        decay_b, k_b, u_b = _kept(
            ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, SLICES, HK, HV, K, V
        )
    return state


@triton.jit
def _replay_and_write(
    state, place, ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, folded, start, ring_slots,
    flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    STATE_GRID: tl.constexpr,
):  # fmt: skip
    """The state behind `start` tokens, those from `folded` on out of the rings; written as
    folded_by says. A state with a grid is replayed from one of its points to the next, and rounded
    there."""
    written = folded_by(start, folded, flush, STATE_GRID)
    if STATE_GRID == 1:
        count = start - folded
        ring_slot = wrapped(ring_slot - count, ring_slots)
        state = _replay(
            state, ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, count, ring_slots,
            HK, HV, K, V,
        )  # fmt: skip
        if written > folded:
            _store_slices(place, state, lane, in_v, K, V)
    else:
        for point in range(folded // STATE_GRID, tl.cdiv(start, STATE_GRID)):
            first = tl.maximum(folded, point * STATE_GRID)
            end = tl.minimum(start, (point + 1) * STATE_GRID)
            begin = wrapped(ring_slot - (start - first), ring_slots)
            state = _replay(
                state, ring_k, ring_u, ring_decay, lane, j, in_v, begin, end - first, ring_slots,
                HK, HV, K, V,
            )  # fmt: skip
            if end % STATE_GRID == 0:
                state = _rounded(state, place.dtype.element_ty)
            if (end == written) & (written > folded):
                _store_slices(place, state, lane, in_v, K, V)
    return state


@triton.jit
def _step_through_window(
    state, of_q, of_k, of_v, of_gates, width, o, ring_u, lane, j, in_v, ring_slot, start, length,
    ring_slots, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    STATE_GRID: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The new tokens, one after another. What a token needs first is loaded a turn ahead."""
    K_LANES: tl.constexpr = lane.shape[0]
    SLICES: tl.constexpr = len(state)
    k = _load_slices(of_k + lane, True, K_LANES, SLICES, K_LANES, K)
    v = tl.load(of_v + j, mask=in_v, other=0.0)
    decay = tl.load(of_gates)
    beta = tl.load(of_gates + 1)
    for t in range(length):
        ahead = tl.minimum(t + 1, length - 1) * width
        q = _load_slices(of_q + t * width + lane, True, K_LANES, SLICES, K_LANES, K)
        u = (v - _sum_over_k(k, state) * decay) * beta
        state = _updated(state, decay, k, u)
        k = _load_slices(of_k + ahead + lane, True, K_LANES, SLICES, K_LANES, K)
        v = tl.load(of_v + ahead + j, mask=in_v, other=0.0)
        decay = tl.load(of_gates + ahead)
        beta = tl.load(of_gates + ahead + 1)
        _store_columns(o + t * (HV * V) + j, _sum_over_k(q, state), lane, in_v)
        _store_columns(ring_u + ring_slot * (HV * V) + j, u, lane, in_v)
        if STATE_GRID > 1:
            if (start + t + 1) % STATE_GRID == 0:
                state = _rounded(state, DTYPE)
        ring_slot = next_slot(ring_slot, ring_slots)


@triton.jit(
    do_not_specialize=["length", "ring_slots", "flush"],
    do_not_specialize_on_alignment=["slots", "starts", "folded"],
)
def _walk_kernel(
    recurrent, ring_u, ring_k, ring_decay, slots, starts, folded, heads, o, length, ring_slots,
    flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SLICES: tl.constexpr, K_LANES: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
    NEAR: tl.constexpr, SECTOR: tl.constexpr, STATE_GRID: tl.constexpr,
):  # fmt: skip
    """One (row, value head, WARPS * COLUMNS values): replay, write, step, on inputs made before."""
    C: tl.constexpr = 2 * HK * K + HV * V
    program = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (WARPS * COLUMNS)
    s = program // HV
    h = (program % HV).to(tl.int32)
    kh = h // (HV // HK)
    token = s * length
    width = C + 2 * HV
    lane = tl.arange(0, K_LANES)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    j = first + (tl.arange(0, WARPS) * COLUMNS)[None, :, None] + column
    in_v = tl.full(j.shape, True, tl.int1) if V % (WARPS * COLUMNS) == 0 else j < V
    slot = tl.load(slots + s).to(tl.int64)
    start = tl.load(starts + s).to(tl.int32)
    held = tl.load(folded + s).to(tl.int32)
    place = recurrent + (slot * HV + h) * (K * V) + lane * V + j
    state = _load_slices(place, in_v, K_LANES * V, SLICES, K_LANES, K, True)
    ring_slot = start % ring_slots
    ring_k += slot * ring_slots * (HK * K) + kh * K
    ring_u += slot * ring_slots * (HV * V) + h * V
    ring_decay += slot * ring_slots * HV + h
    heads += token * width
    of_q = heads + kh * K
    of_k = heads + (HK + kh) * K
    of_v = heads + 2 * HK * K + h * V
    bring_near(
        ring_k, ring_u, of_q, of_k, of_v, width, first, ring_slot, start - held, ring_slots, length,
        HK, HV, K, V, SLICES * K_LANES, WARPS * COLUMNS, NEAR, SECTOR,
    )  # fmt: skip
    state = _replay_and_write(
        state, place, ring_k, ring_u, ring_decay, lane, j, in_v, ring_slot, held, start, ring_slots,
        flush, HK, HV, K, V, STATE_GRID,
    )  # fmt: skip
    _step_through_window(
        state, of_q, of_k, of_v, heads + C + 2 * h, width, o + (token * HV + h) * V, ring_u,
        lane, j, in_v, ring_slot, start, length, ring_slots, HV, K, V, STATE_GRID,
        recurrent.dtype.element_ty,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "eps"])
def _norm_kernel(
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


def layout_of(sizes: dict[str, int]) -> dict[str, int]:
    """How a head's state lies in registers: SLICES x K_LANES rows, WARPS warps of COLUMNS columns.

    A thread holds 4 neighbours of COLUMNS, so COLUMNS / 4 x K_LANES threads make a warp. There are
    more threads than K and than V, or else the compiler takes vectors over shared memory. 1 to 8
    warps.
    """
    blocks = blocks_of(sizes, WIDEST)
    k = blocks["BLOCK_K"]
    v = blocks["BLOCK_V"]
    warps = min(max(k, v) // 16, v // 4)
    columns = v // warps
    lanes = max(1, min(k, 128 // columns))
    return dict(SLICES=k // lanes, K_LANES=lanes, WARPS=warps, COLUMNS=columns)


def _flat(x: Tensor) -> Tensor:
    """[S, Q, ...] -> [S * Q, ...], tokens begun on whole vectors, so that one binary serves all."""
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
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    flush: int = 1,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_step."""
    rows, length, channels = mixed.shape
    sizes = sizes_of(state)
    hk, hv, _, v = state.sizes()
    out = torch.empty(rows, length, hv, v, dtype=z.dtype, device=mixed.device)
    if not out.numel():
        return out
    mixed = _flat(mixed)
    z = _flat(z)
    b = b.flatten(0, 1)
    a = a.flatten(0, 1)
    taps = weights.conv.t().contiguous()
    ring_slots = state.conv.shape[1]
    f32 = dict(dtype=torch.float32, device=mixed.device)
    heads = torch.empty(rows, length, channels + 2 * hv, **f32)
    o = torch.empty(out.shape, **f32)
    blocks = blocks_of(sizes, WIDEST)
    inputs_kernel[(rows, 2 * hk + hv)](
        mixed, b, a, taps, weights.a_log, weights.dt_bias, state.conv, state.k, state.decay,
        slots, starts, heads, length, ring_slots, mixed.stride(0), b.stride(0), a.stride(0),
        **sizes, **blocks, R=len(taps) - 1, L2_EPS=L2_EPS,
        TOKENS=min(MOST_TOKENS, triton.next_power_of_2(length)),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    layout = layout_of(sizes)
    warps = layout["WARPS"] // PARTS or 1
    layout["WARPS"] = warps
    _walk_kernel[(rows * hv, triton.cdiv(v, warps * layout["COLUMNS"]))](
        state.recurrent, state.u, state.k, state.decay, slots, starts, folded, heads, o,
        length, ring_slots, flush, **sizes, **layout,
        NEAR=NEAR if length <= NEAR else 2 * NEAR, SECTOR=SECTOR, STATE_GRID=state.grid,
        num_warps=warps, maxnreg=MOST_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    _norm_kernel[(triton.cdiv(rows * length * hv, HEADS),)](
        o, z, weights.norm, out, rows * length * hv, z.stride(0), weights.eps,
        HV=hv, V=v, BLOCK_V=blocks["BLOCK_V"], HEADS=HEADS,
        num_warps=NORM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out
