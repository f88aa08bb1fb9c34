# mypy: ignore-errors
"""The recurrent form in Triton: a window of generated tokens through a recurrent state.

recurrent_step_kernel reads the state once and writes it at most once. It keeps some columns of a
head's state in registers, replays the tokens that the state lacks from the history, writes the
state if that is due, and steps through the new tokens. Window length, history length, replayed
tokens and flush interval are run-time values. Windows whose first tokens are certain to stay have a
binary of their own: it writes the state inside of the window, and save_tokens_kernel follows it.

A state is a tuple of SLICES tiles [K_LANES, WARPS, COLUMNS]. A warp owns COLUMNS columns (of V) and
all of K, so a sum over K needs no exchange between warps. Slice r is rows r * K_LANES up to
(r + 1) * K_LANES. It is a tuple, not a 4-D tile, so that every address is a base plus a constant.

docs/kernels/gated_delta_rule.md has the times; those in this file are of the delta rule.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.history import next_folded, next_index, wrap_index


@triton.jit
def prefetch_tokens(
    k_history_ptr, u_history_ptr, q_ptr, k_ptr, v_ptr, width, first_v, history_index, count,
    history_len, length,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, MAX_TOKENS: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """Prefetch into L1 the last replayed tokens and the first new ones, MAX_TOKENS of each.

    count: tokens that are replayed. length: new tokens. One float of each SECTOR is loaded.
    """
    n = tl.arange(0, MAX_TOKENS)[:, None]
    offs_k = (tl.arange(0, BLOCK_K // SECTOR) * SECTOR)[None, :]
    offs_v = first_v + (tl.arange(0, (BLOCK_V + SECTOR - 1) // SECTOR) * SECTOR)[None, :]
    back = wrap_index(history_index - 1 - tl.minimum(n, tl.maximum(count - 1, 0)), history_len)
    t = tl.minimum(n, length - 1) * width
    in_k = (n >= 0) & (offs_k < K)
    in_v = (n >= 0) & (offs_v < V)
    k_history = k_history_ptr + back * (HK * K) + offs_k
    u_history = u_history_ptr + back * (HV * V) + offs_v
    tiles = (
        (k_history, in_k), (u_history, in_v), (q_ptr + t + offs_k, in_k),
        (k_ptr + t + offs_k, in_k), (v_ptr + t + offs_v, in_v),
    )  # fmt: skip
    values = ()
    for p in tl.static_range(len(tiles)):
        values = values + (tl.load(tiles[p][0], mask=tiles[p][1], other=0.0),)
    # The compiler drops a load whose value is unused, and a volatile load leaves nothing in L1. So
    # the value is "used" by a store that happens only for NaN, and then rewrites that same NaN.
    for p in tl.static_range(len(tiles)):
        tl.store(tiles[p][0], values[p], mask=tiles[p][1] & (values[p] != values[p]))


@triton.jit
def _fma(x, y, z):
    # Explicit: enable_fp_fusion is off, so that the compiler cannot choose where to fuse.
    return tl.fma(tl.broadcast_to(x, z.shape), tl.broadcast_to(y, z.shape), z)


@triton.jit
def _load_slices(
    ptrs, in_v, row_stride,
    SLICES: tl.constexpr, K_LANES: tl.constexpr, K: tl.constexpr, STREAMING: tl.constexpr = False,
):  # fmt: skip
    """Load K rows as a tuple of SLICES fp32 tiles of K_LANES rows.

    row_stride: elements between slices. STREAMING: the data is read once, so evict it first.
    """
    POLICY: tl.constexpr = "evict_first" if STREAMING else ""
    lane = tl.arange(0, K_LANES)[:, None, None]
    new = tl.load(ptrs, mask=in_v & (lane < K), other=0.0, eviction_policy=POLICY)
    x = (new.to(tl.float32),)
    for r in tl.static_range(1, SLICES):
        mask = in_v & (lane + r * K_LANES < K)
        new = tl.load(ptrs + r * row_stride, mask=mask, other=0.0, eviction_policy=POLICY)
        x = x + (new.to(tl.float32),)
    return x


@triton.jit
def _store_slices(ptrs, state, lane, in_v, K: tl.constexpr, V: tl.constexpr):
    """Store the state, rounded to its dtype in memory."""
    K_LANES: tl.constexpr = lane.shape[0]
    for r in tl.static_range(len(state)):
        mask = (lane + r * K_LANES < K) & in_v
        new = state[r].to(ptrs.dtype.element_ty)
        tl.store(ptrs + r * (K_LANES * V), new, mask=mask)


@triton.jit
def _write_if_due(state, state_ptrs, tokens, written, lane, in_v, K: tl.constexpr, V: tl.constexpr):
    """Store the state if it is the one after `written` tokens."""
    if tokens == written:
        _store_slices(state_ptrs, state, lane, in_v, K, V)


@triton.jit
def _round_state(state, DTYPE: tl.constexpr):
    """Round the state to DTYPE and widen it to fp32 again."""
    new = (state[0].to(DTYPE).to(tl.float32),)
    for r in tl.static_range(1, len(state)):
        new = new + (state[r].to(DTYPE).to(tl.float32),)
    return new


@triton.jit
def _sum_over_k(x, state):
    """Compute x^T S of slices x [K_LANES, 1, 1] and a state -> [1, WARPS, COLUMNS]."""
    # The order of additions is fixed: a thread adds its own slices as a chain of fused
    # multiply-adds, then tl.sum adds the K_LANES lanes of the warp. tests/kernels/compiles.py
    # (LAYERS) checks that the lane layout is equal in all binaries.
    acc = x[0] * state[0]
    for r in tl.static_range(1, len(state)):
        acc = _fma(x[r], state[r], acc)
    return tl.sum(acc, 0, keep_dims=True)


@triton.jit
def _update_state(state, decay, k, u):
    """Compute S * decay + k u^T."""
    # Replay and step call this one expression, so that both give the same bits.
    new = (_fma(k[0], u, state[0] * decay),)
    for r in tl.static_range(1, len(state)):
        new = new + (_fma(k[r], u, state[r] * decay),)
    return new


@triton.jit
def _store_columns(ptrs, x, lane, in_v):
    """Store x [1, WARPS, COLUMNS], which is the same in every lane of K, from the first lane."""
    ptrs = ptrs + tl.zeros_like(lane)
    first_lane = in_v & (lane == 0)
    tl.store(ptrs, tl.broadcast_to(x, ptrs.shape).to(ptrs.dtype.element_ty), mask=first_lane)


@triton.jit
def _load_token(
    k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index,
    SLICES: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Load decay, k and u of one token from the history."""
    # Never masked by the number of tokens: the software pipeline of _replay loads up to two tokens
    # more than it uses, and every index is inside of the buffer.
    k = _load_slices(k_history_ptr + index * (HK * K) + lane, True, lane.shape[0], SLICES,
                     lane.shape[0], K)  # fmt: skip
    u = tl.load(u_history_ptr + index * (HV * V) + offs_v, mask=in_v, other=0.0)
    return tl.load(decay_history_ptr + index * HV), k, u


@triton.jit
def _replay(
    state, k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index, count,
    history_len,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Replay `count` tokens of the history, from `index` on, into the state."""
    SLICES: tl.constexpr = len(state)
    # Software pipeline of two stages, a and b: while one token updates the state, the next two are
    # loading. Unrolled by two, so that no loaded register is moved from one stage to the other.
    decay_a, k_a, u_a = _load_token(
        k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index, SLICES,
        HK, HV, K, V,
    )  # fmt: skip
    index = next_index(index, history_len)
    decay_b, k_b, u_b = _load_token(
        k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index, SLICES,
        HK, HV, K, V,
    )  # fmt: skip
    for n in range(0, count, 2):
        state = _update_state(state, decay_a, k_a, u_a)
        index = next_index(index, history_len)
        decay_a, k_a, u_a = _load_token(
            k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index, SLICES,
            HK, HV, K, V,
        )  # fmt: skip
        if n + 1 < count:
            state = _update_state(state, decay_b, k_b, u_b)
        index = next_index(index, history_len)
        decay_b, k_b, u_b = _load_token(
            k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, index, SLICES,
            HK, HV, K, V,
        )  # fmt: skip
    return state


@triton.jit
def _replay_and_write(
    state, state_ptrs, k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v,
    history_index, folded, start, history_len, written,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    STATE_GRID: tl.constexpr, COMMITTED: tl.constexpr,
):  # fmt: skip
    """Replay tokens folded .. start - 1 from the history; write the state if `written` is larger.

    A 16-bit state is replayed from one multiple of STATE_GRID to the next and rounded there.
    COMMITTED: `written` may be a token of the window, as it always is for an fp32 state.
    """
    if STATE_GRID == 1:
        count = start - folded
        history_index = wrap_index(history_index - count, history_len)
        state = _replay(
            state, k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v,
            history_index, count, history_len, HK, HV, K, V,
        )  # fmt: skip
        if not COMMITTED:
            if written > folded:
                _store_slices(state_ptrs, state, lane, in_v, K, V)
    else:
        # Rounding points are absolute positions. So the bits do not depend on which step replays.
        for point in range(folded // STATE_GRID, tl.cdiv(start, STATE_GRID)):
            first = tl.maximum(folded, point * STATE_GRID)
            end = tl.minimum(start, (point + 1) * STATE_GRID)
            begin = wrap_index(history_index - (start - first), history_len)
            state = _replay(
                state, k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v, begin,
                end - first, history_len, HK, HV, K, V,
            )  # fmt: skip
            if end % STATE_GRID == 0:
                state = _round_state(state, state_ptrs.dtype.element_ty)
            if (end == written) & (written > folded):
                _store_slices(state_ptrs, state, lane, in_v, K, V)
    return state


@triton.jit
def _step_through_window(
    state, q_ptr, k_ptr, v_ptr, gates_ptr, width, out_ptr, u_history_ptr, lane, offs_v, in_v,
    history_index, start, length, history_len, d, state_ptrs, written,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    STATE_GRID: tl.constexpr, DTYPE: tl.constexpr, DELTA_RULE: tl.constexpr,
    COMMITTED: tl.constexpr,
):  # fmt: skip
    """Step through the new tokens one after another: store their outputs, and u to the history.

    gates_ptr: (decay, beta) of each token. d: the head's skip weight D, or None. COMMITTED: write
    the state as of `written` tokens, and store u only of the tokens after them.
    """
    K_LANES: tl.constexpr = lane.shape[0]
    SLICES: tl.constexpr = len(state)
    # What a token needs first (k, v, decay, beta) is loaded one iteration ahead.
    k = _load_slices(k_ptr + lane, True, K_LANES, SLICES, K_LANES, K)
    v = tl.load(v_ptr + offs_v, mask=in_v, other=0.0)
    decay = tl.load(gates_ptr)
    beta = tl.load(gates_ptr + 1)
    for t in range(length):
        # The last iteration loads its own token again: in bounds, and without a branch.
        next_token = tl.minimum(t + 1, length - 1) * width
        q = _load_slices(q_ptr + t * width + lane, True, K_LANES, SLICES, K_LANES, K)
        if DELTA_RULE:
            u = (v - _sum_over_k(k, state) * decay) * beta
        else:
            u = v * beta
        state = _update_state(state, decay, k, u)
        if d is not None:
            skip = v * d
        k = _load_slices(k_ptr + next_token + lane, True, K_LANES, SLICES, K_LANES, K)
        v = tl.load(v_ptr + next_token + offs_v, mask=in_v, other=0.0)
        decay = tl.load(gates_ptr + next_token)
        beta = tl.load(gates_ptr + next_token + 1)
        out_ptrs = out_ptr + t * (HV * V) + offs_v
        o = _sum_over_k(q, state)
        if d is not None:
            o += skip
        _store_columns(out_ptrs, o, lane, in_v)
        # A committed window may wrap around the history: only entries that stay are stored.
        u_mask = in_v & (start + t >= written) if COMMITTED else in_v
        _store_columns(u_history_ptr + history_index * (HV * V) + offs_v, u, lane, u_mask)
        if STATE_GRID > 1:
            if (start + t + 1) % STATE_GRID == 0:
                state = _round_state(state, DTYPE)
                if COMMITTED:
                    _write_if_due(state, state_ptrs, start + t + 1, written, lane, in_v, K, V)
        history_index = next_index(history_index, history_len)
    if COMMITTED and STATE_GRID == 1:
        _store_slices(state_ptrs, state, lane, in_v, K, V)


@triton.jit(
    do_not_specialize=["length", "history_len", "flush"],
    do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "folded_ptr", "committed_ptr"],
)
def recurrent_step_kernel(
    state_ptr, u_history_ptr, k_history_ptr, decay_history_ptr, slots_ptr, starts_ptr, folded_ptr,
    inputs_ptr, out_ptr, d_ptr, committed_ptr, length, history_len, flush,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SLICES: tl.constexpr, K_LANES: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
    PREFETCH: tl.constexpr, SECTOR: tl.constexpr, STATE_GRID: tl.constexpr,
    DELTA_RULE: tl.constexpr, ADJACENT_CTAS: tl.constexpr,
):  # fmt: skip
    """Replay, write and step for one (row, value head, WARPS * COLUMNS columns of V).

    inputs [S * Q, 2 HK K + HV V + 2 HV]: all q, all k, all v, then (decay, beta) of each value
    head. DELTA_RULE: u is (v - k^T S decay) beta, else v beta. d [HV]: the output is q^T S + D v;
    None: q^T S. committed [S]: tokens of each window that are certain to stay, the only ones that
    are stepped through; None: all are, and any may be rejected. ADJACENT_CTAS: CTAs of a head with
    consecutive ids in grid dimension 0; 1 if grid dimension 1 counts them.
    """
    pdl_start()
    COMMITTED: tl.constexpr = committed_ptr is not None
    C: tl.constexpr = 2 * HK * K + HV * V
    pid = (tl.program_id(0) // ADJACENT_CTAS).to(tl.int64)
    first_v = (tl.program_id(0) % ADJACENT_CTAS + tl.program_id(1)) * (WARPS * COLUMNS)
    row = pid // HV
    head = (pid % HV).to(tl.int32)
    k_head = head // (HV // HK)
    token = row * length
    width = C + 2 * HV
    lane = tl.arange(0, K_LANES)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    offs_v = first_v + (tl.arange(0, WARPS) * COLUMNS)[None, :, None] + column
    # A constant mask where V is a multiple of the tile, so that loads of the state stay vectors.
    in_v = tl.full(offs_v.shape, True, tl.int1) if V % (WARPS * COLUMNS) == 0 else offs_v < V
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row).to(tl.int32)
    folded = tl.load(folded_ptr + row).to(tl.int32)
    if COMMITTED:
        length = tl.load(committed_ptr + row).to(tl.int32)
    state_ptrs = state_ptr + (slot * HV + head) * (K * V) + lane * V + offs_v
    # The state is most of the traffic: its loads are issued before everything else.
    state = _load_slices(state_ptrs, in_v, K_LANES * V, SLICES, K_LANES, K, True)
    history_index = start % history_len
    k_history_ptr += slot * history_len * (HK * K) + k_head * K
    u_history_ptr += slot * history_len * (HV * V) + head * V
    decay_history_ptr += slot * history_len * HV + head
    inputs_ptr += token * width
    q_ptr = inputs_ptr + k_head * K
    k_ptr = inputs_ptr + (HK + k_head) * K
    v_ptr = inputs_ptr + 2 * HK * K + head * V
    prefetch_tokens(
        k_history_ptr, u_history_ptr, q_ptr, k_ptr, v_ptr, width, first_v, history_index,
        start - folded, history_len, length,
        HK, HV, K, V, SLICES * K_LANES, WARPS * COLUMNS, PREFETCH, SECTOR,
    )  # fmt: skip
    if COMMITTED:
        written = next_folded(start + length, folded, 1, STATE_GRID)
    else:
        written = next_folded(start, folded, flush, STATE_GRID)
    state = _replay_and_write(
        state, state_ptrs, k_history_ptr, u_history_ptr, decay_history_ptr, lane, offs_v, in_v,
        history_index, folded, start, history_len, written, HK, HV, K, V, STATE_GRID, COMMITTED,
    )  # fmt: skip
    if COMMITTED:
        # u of a long window may take entries that other threads of the CTA have just replayed.
        tl.debug_barrier()
    d = tl.load(d_ptr + head) if d_ptr is not None else None
    _step_through_window(
        state, q_ptr, k_ptr, v_ptr, inputs_ptr + C + 2 * head, width,
        out_ptr + (token * HV + head) * V, u_history_ptr,
        lane, offs_v, in_v, history_index, start, length, history_len, d, state_ptrs, written,
        HV, K, V, STATE_GRID, state_ptr.dtype.element_ty, DELTA_RULE, COMMITTED,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["length", "history_len"],
    do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "folded_ptr", "committed_ptr"],
)
def save_tokens_kernel(
    inputs_ptr, k_history_ptr, decay_history_ptr, slots_ptr, starts_ptr, folded_ptr, committed_ptr,
    length, history_len,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_HV: tl.constexpr, STATE_GRID: tl.constexpr,
):  # fmt: skip
    """Save k and decay of one token to the histories, if the written state lacks the token.

    Grid: (row, tokens before the end of the row's window). inputs: see recurrent_step_kernel.
    """
    pdl_start()
    # A kernel after the recurrence: in a window longer than the histories, these tokens may take
    # entries that other CTAs of the row still replay.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row).to(tl.int32)
    folded = tl.load(folded_ptr + row).to(tl.int32)
    committed = tl.load(committed_ptr + row).to(tl.int32)
    written = next_folded(start + committed, folded, 1, STATE_GRID)
    t = committed - 1 - tl.program_id(1)
    if (t < 0) | (start + t < written):
        return
    C: tl.constexpr = 2 * HK * K + HV * V
    token_ptr = inputs_ptr + (row * length + t) * (C + 2 * HV)
    entry = slot * history_len + (start + t) % history_len
    offs = tl.arange(0, BLOCK_K)
    k = tl.load(token_ptr + HK * K + offs, mask=offs < HK * K, other=0.0)
    tl.store(k_history_ptr + entry * (HK * K) + offs, k, mask=offs < HK * K)
    head = tl.arange(0, BLOCK_HV)
    decay = tl.load(token_ptr + C + 2 * head, mask=head < HV, other=0.0)
    tl.store(decay_history_ptr + entry * HV + head, decay, mask=head < HV)
