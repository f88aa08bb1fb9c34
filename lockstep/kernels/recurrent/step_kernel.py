# mypy: ignore-errors
"""A generated window through a recurrent state in Triton: replay, write, step.

The state is read once and written at most once. walk_kernel holds some columns of a head's state in
registers, replays the tokens that it lacks, writes it where that is due, and steps through the
window. Tokens, window, ring length and flush are run-time values.

A state is a tuple of SLICES tensors [K_LANES, WARPS, COLUMNS]: a warp owns COLUMNS values of V and
all of K, so that a sum over K stays inside it; slice r holds rows r * K_LANES and following. A
tuple, so that addresses are one base and a constant. See docs/kernels/gated_delta_rule.md, where
the times are: those of the delta rule.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.history import next_folded, next_slot, wrapped


@triton.jit
def bring_near(
    ring_k, ring_u, q, k, v, width, first, ring_slot, count, ring_slots, length,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MOST: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """Brings what the last MOST of `count` replayed and the first MOST new tokens need into L1.

    It loads one float of each SECTOR. A load whose value is not used is dropped by the compiler,
    and a volatile one leaves nothing in L1; so a NaN is stored back to where it was read, which
    changes nothing.
    """
    n = tl.arange(0, MOST)[:, None]
    i = (tl.arange(0, BLOCK_K // SECTOR) * SECTOR)[None, :]
    j = first + (tl.arange(0, (BLOCK_V + SECTOR - 1) // SECTOR) * SECTOR)[None, :]
    back = wrapped(ring_slot - 1 - tl.minimum(n, tl.maximum(count - 1, 0)), ring_slots)
    t = tl.minimum(n, length - 1) * width
    in_k = (n >= 0) & (i < K)
    in_v = (n >= 0) & (j < V)
    of_k = ring_k + back * (HK * K) + i
    of_u = ring_u + back * (HV * V) + j
    places = ((of_k, in_k), (of_u, in_v), (q + t + i, in_k), (k + t + i, in_k), (v + t + j, in_v))
    words = ()
    for p in tl.static_range(len(places)):
        words = words + (tl.load(places[p][0], mask=places[p][1], other=0.0),)
    for p in tl.static_range(len(places)):
        tl.store(places[p][0], words[p], mask=places[p][1] & (words[p] != words[p]))


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
    next_folded says. A state with a grid is replayed from one of its points to the next, and
    rounded there."""
    written = next_folded(start, folded, flush, STATE_GRID)
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
    ring_slots, skip, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    STATE_GRID: tl.constexpr, DTYPE: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """The new tokens, one after another. What a token needs first is loaded a turn ahead. skip: the
    head's D, or None."""
    K_LANES: tl.constexpr = lane.shape[0]
    SLICES: tl.constexpr = len(state)
    k = _load_slices(of_k + lane, True, K_LANES, SLICES, K_LANES, K)
    v = tl.load(of_v + j, mask=in_v, other=0.0)
    decay = tl.load(of_gates)
    beta = tl.load(of_gates + 1)
    for t in range(length):
        ahead = tl.minimum(t + 1, length - 1) * width
        q = _load_slices(of_q + t * width + lane, True, K_LANES, SLICES, K_LANES, K)
        if CORRECTS:
            u = (v - _sum_over_k(k, state) * decay) * beta
        else:
            u = v * beta
        state = _updated(state, decay, k, u)
        if skip is not None:
            past = v * skip
        k = _load_slices(of_k + ahead + lane, True, K_LANES, SLICES, K_LANES, K)
        v = tl.load(of_v + ahead + j, mask=in_v, other=0.0)
        decay = tl.load(of_gates + ahead)
        beta = tl.load(of_gates + ahead + 1)
        place = o + t * (HV * V) + j
        found = _sum_over_k(q, state)
        if skip is not None:
            found += past
        _store_columns(place, found, lane, in_v)
        _store_columns(ring_u + ring_slot * (HV * V) + j, u, lane, in_v)
        if STATE_GRID > 1:
            if (start + t + 1) % STATE_GRID == 0:
                state = _rounded(state, DTYPE)
        ring_slot = next_slot(ring_slot, ring_slots)


@triton.jit(
    do_not_specialize=["length", "ring_slots", "flush"],
    do_not_specialize_on_alignment=["slots", "starts", "folded"],
)
def walk_kernel(
    recurrent, ring_u, ring_k, ring_decay, slots, starts, folded, heads, o, skip, length,
    ring_slots, flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SLICES: tl.constexpr, K_LANES: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
    NEAR: tl.constexpr, SECTOR: tl.constexpr, STATE_GRID: tl.constexpr, CORRECTS: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """One (row, value head, WARPS * COLUMNS values): replay, write, step, on inputs made before.

    heads [S * Q, 2 HK K + HV V + 2 HV]: all q, all k, all v, and (decay, beta) of each value head.
    CORRECTS: u is (v - k^T S) beta, else v beta. skip: D [HV], o is q^T S + D v; None: q^T S.
    BESIDE: programs of a head, where they stand beside each other; 1 where the grid's second
    dimension counts them.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    program = (tl.program_id(0) // BESIDE).to(tl.int64)
    first = (tl.program_id(0) % BESIDE + tl.program_id(1)) * (WARPS * COLUMNS)
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
    through = tl.load(skip + h) if skip is not None else None
    _step_through_window(
        state, of_q, of_k, of_v, heads + C + 2 * h, width, o + (token * HV + h) * V, ring_u,
        lane, j, in_v, ring_slot, start, length, ring_slots, through, HV, K, V, STATE_GRID,
        recurrent.dtype.element_ty, CORRECTS,
    )  # fmt: skip
