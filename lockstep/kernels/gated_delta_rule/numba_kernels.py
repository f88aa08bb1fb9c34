# mypy: ignore-errors
"""Numba kernel of gated_delta_step: convolution, gates, replay, window and norm in one call.

Replay and window update a state by the same operations: s = fma(k, u, s * decay). Products with a
state add over its K rows in ascending order, one chain of fma per column.
"""

import numpy as np

from lockstep.kernels.gated_delta_rule.reference import L2_EPS
from lockstep.kernels.norm.numba_kernels import gated_norm_row
from lockstep.kernels.recurrent.numba_kernels import next_folded
from lockstep.kernels.simd.compiler import KernelTable, inline, keep_alive, kernel
from lockstep.kernels.simd.functions import exp, inverse_sqrt, sigmoid, silu, softplus
from lockstep.kernels.simd.vectors import (
    BF16,
    F32,
    FLOATS,
    LANES,
    fma,
    load,
    load_int,
    load_int32,
    rounded,
    splat,
    store,
    sum_lanes,
    vload,
    vload_part,
    vstore,
    vstore_part,
    zeros,
)

EPS = F32(L2_EPS)


@inline
def _convolve(dtype, size, mixed, stride, conv, slot, conv_len, taps, history, position, out,
              count, length):  # fmt: skip
    """Convolve a row's window: out [Q, C] fp32 = silu(sum of taps, ascending).

    mixed: the row's first token. conv: raw inputs of earlier tokens. taps: [R + 1, C].
    """
    for t in range(length):
        for c in range(0, count, LANES):
            acc = zeros()
            for j in range(history + 1):
                source = t + j - history
                if source < 0:
                    index = slot * conv_len + (position + source) % conv_len
                    value = vload_part(dtype, conv + index * count * size, c, count)
                else:
                    value = vload_part(dtype, mixed + source * stride * size, c, count)
                tap = vload_part(dtype, taps + j * count * size, c, count)
                acc = fma(value, tap, acc)
            vstore_part(F32, out + t * count * 4, c, count, silu(acc))


@inline
def _l2_normalize(x, width, scale):
    """Divide x [width] fp32 by the root of its sum of squares + EPS, in place, times scale."""
    squares = zeros()
    for i in range(0, width, LANES):
        value = vload_part(F32, x, i, width)
        squares = fma(value, value, squares)
    factor = splat(inverse_sqrt(sum_lanes(squares) + EPS))
    for i in range(0, width, LANES):
        value = vload_part(F32, x, i, width) * factor
        vstore_part(F32, x, i, width, value * splat(scale))


@inline
def _decay(s, rows, columns, factor):
    """Multiply a state [rows, columns] fp32 by a factor; columns is a multiple of 16."""
    for i in range(0, rows * columns, LANES):
        vstore(F32, s, i, vload(F32, s, i) * factor)


@inline
def _add_outer(s, rows, columns, k, u):
    """Add k u^T to a state."""
    for r in range(rows):
        factor = splat(load(F32, k, r))
        for c in range(0, columns, LANES):
            index = r * columns + c
            vstore(F32, s, index, fma(factor, vload(F32, u, c), vload(F32, s, index)))


@inline
def _times_state(x, s, rows, columns, out):
    """Compute out [columns] = x [rows] times a state."""
    for c in range(0, columns, LANES):
        acc = zeros()
        for r in range(rows):
            acc = fma(splat(load(F32, x, r)), vload(F32, s, r * columns + c), acc)
        vstore(F32, out, c, acc)


@inline
def _round_state(state_dtype, s, count):
    """Round a state to its dtype in memory."""
    for i in range(0, count, LANES):
        vstore(F32, s, i, rounded(state_dtype, vload(F32, s, i)))


@inline
def _copy_rows(source_dtype, target_dtype, source, source_stride, target, target_stride, rows,
               width):  # fmt: skip
    """Copy rows of `width` elements, with zeros for padding that only the target has."""
    for r in range(rows):
        for c in range(0, width, LANES):
            value = vload_part(source_dtype, source, r * source_stride + c,
                               r * source_stride + width)  # fmt: skip
            if target_stride > width:
                vstore(target_dtype, target, r * target_stride + c, value)
            else:
                vstore_part(target_dtype, target, r * target_stride + c,
                            r * target_stride + width, value)  # fmt: skip


@inline
def _prepare_token(dtype, size, x, a, b, a_log, dt_bias, decays, betas, hk, hv, dk):
    """Normalize a token's q and k in place, and compute decay and write strength of each head."""
    for h in range(hk):
        _l2_normalize(x + h * dk * 4, dk, F32(dk**-0.5))
        _l2_normalize(x + (hk + h) * dk * 4, dk, F32(1.0))
    for h in range(0, hv, LANES):
        rate = exp(vload_part(F32, a_log, h, hv))
        dt = softplus(vload_part(dtype, a, h, hv) + vload_part(F32, dt_bias, h, hv))
        vstore(F32, decays, h, exp(zeros() - rate * dt))
        vstore(F32, betas, h, sigmoid(vload_part(dtype, b, h, hv)))


@inline
def _finish_token(state_dtype, state_size, s, memory, columns, dk, dv, tokens, target, grid):
    """Round a state on its grid after `tokens` tokens, and write it if they are `target`."""
    if state_size == 2 and tokens % grid == 0:
        _round_state(state_dtype, s, dk * columns)
    if tokens == target:
        _copy_rows(F32, state_dtype, s, columns, memory, dv, dk, dv)


@inline
def _replay(
    state_dtype, state_size, s, memory, u_history, k_history, decay_history, slot, entries, h, hk,
    hv, dk, dv, columns, first, start, target, grid, u,
):  # fmt: skip
    """Load head h's state and replay tokens first .. start - 1; write it as of target."""
    _copy_rows(state_dtype, F32, memory, dv, s, columns, dk, dv)
    for position in range(first, start):
        entry = slot * entries + position % entries
        _decay(s, dk, columns, splat(load(F32, decay_history, entry * hv + h)))
        _copy_rows(F32, F32, u_history + (entry * hv + h) * dv * 4, dv, u, columns, 1, dv)
        _add_outer(s, dk, columns, k_history + (entry * hk + h * hk // hv) * dk * 4, u)
        _finish_token(
            state_dtype, state_size, s, memory, columns, dk, dv, position + 1, target, grid
        )


@inline
def _apply_delta_rule(s, q, k, v, decay, beta, dk, dv, columns, u, o):
    """Apply the gated delta rule to one token of a head: updates s and fills u and o."""
    _decay(s, dk, columns, splat(decay))
    _times_state(k, s, dk, columns, o)
    factor = splat(beta)
    for c in range(0, columns, LANES):
        vstore(F32, u, c, (vload_part(F32, v, c, dv) - vload(F32, o, c)) * factor)
    _add_outer(s, dk, columns, k, u)
    _times_state(q, s, dk, columns, o)


@inline
def _save_token(
    u, k, decay, u_history, k_history, decay_history, entry, h, hk, hv, dk, dv, columns
):  # fmt: skip
    """Write what replays a token into head h's state; the first head of a group writes k."""
    _copy_rows(F32, F32, u, columns, u_history + (entry * hv + h) * dv * 4, dv, 1, dv)
    store(F32, decay_history, entry * hv + h, decay)
    if h % (hv // hk) == 0:
        key = k_history + (entry * hk + h * hk // hv) * dk * 4
        _copy_rows(F32, F32, k, dk, key, dk, 1, dk)


@inline
def _run_window(
    dtype, size, state_dtype, state_size, raw, mixed_stride, convolved, channels,
    decays, betas, heads, z, z_stride, norm_weight, out, token, eps, length, start,
    states, state_bytes, memory, conv, slot, conv_len, history, u_history, k_history,
    decay_history, entries, committed, target, due, grid, hk, hv, dk, dv, columns, u,
    o,
):  # fmt: skip
    """Step the tokens of a row's window, all heads of a token before the next one.

    Every token's u, k and decay go to the histories; of a committed window only those that the
    state in memory lacks, and the raw inputs of its last tokens.
    """
    for t in range(length):
        position = start + t
        x = convolved + t * channels * 4
        for h in range(hv):
            s = states + h * state_bytes
            key_head = h * hk // hv
            k = x + (hk + key_head) * dk * 4
            decay = load(F32, decays, t * heads + h)
            _apply_delta_rule(
                s, x + key_head * dk * 4, k, x + (2 * hk * dk + h * dv) * 4, decay,
                load(F32, betas, t * heads + h), dk, dv, columns, u, o,
            )  # fmt: skip
            _finish_token(
                state_dtype, state_size, s, memory + h * dk * dv * state_size, columns, dk,
                dv, position + 1, due, grid,
            )  # fmt: skip
            gated_norm_row(
                dtype, o, z + ((token + t) * z_stride + h * dv) * size, norm_weight,
                out + ((token + t) * hv + h) * dv * size, dv, eps,
            )  # fmt: skip
            if committed == 0 or position >= target:
                _save_token(
                    u, k, decay, u_history, k_history, decay_history,
                    slot * entries + position % entries, h, hk, hv, dk, dv, columns,
                )  # fmt: skip
        if committed == 0 or t >= length - history:
            index = slot * conv_len + position % conv_len
            _copy_rows(
                dtype, dtype, raw + t * mixed_stride * size, channels,
                conv + index * channels * size, channels, 1, channels,
            )  # fmt: skip


@inline
def _folded_after(start, folded, flush, grid, committed, length):
    """Compute lockstep.kernels.recurrent.history.folded_after of one row. committed: 0 for none."""
    if committed == 0:
        return next_folded(start, folded, flush, grid)
    return next_folded(start + length, folded, 1, grid)


def _make_kernel(dtype, size, state_dtype, state_size):
    """Return the kernel of a dtype and a dtype of the state in memory."""

    @kernel
    def gated_delta_step(
        mixed, z, b, a, conv_weight, a_log, dt_bias, norm_weight, recurrent, conv, u_history,
        k_history, decay_history, slots, starts, folded, committed, out,
        window, hk, hv, dk, dv, history, conv_len, entries, grid, mixed_stride, z_stride, b_stride,
        a_stride, eps, flush, begin, end,
    ):  # fmt: skip
        """Step the rows begin .. end as the op gated_delta_step does. committed: 0 for none."""
        columns = -(-dv // LANES) * LANES
        heads = -(-hv // LANES) * LANES
        channels = 2 * hk * dk + hv * dv
        state_bytes = dk * columns * 4
        scratch = np.empty(
            window * (channels + 2 * heads) + hv * dk * columns + 2 * columns, np.float32
        )
        convolved = scratch.ctypes.data
        decays = convolved + window * channels * 4
        betas = decays + window * heads * 4
        states = betas + window * heads * 4
        u = states + hv * state_bytes
        o = u + columns * 4
        for row in range(begin, end):
            slot = load_int(slots, row)
            start = load_int32(starts, row)
            first = load_int32(folded, row)
            length = window if committed == 0 else load_int32(committed, row)
            target = _folded_after(start, first, flush, grid, committed, length)
            token = row * window
            memory = recurrent + slot * hv * dk * dv * state_size
            raw = mixed + token * mixed_stride * size
            _convolve(
                dtype, size, raw, mixed_stride, conv, slot, conv_len, conv_weight, history, start,
                convolved, channels, length,
            )  # fmt: skip
            for t in range(length):
                _prepare_token(
                    dtype, size, convolved + t * channels * 4, a + (token + t) * a_stride * size,
                    b + (token + t) * b_stride * size, a_log, dt_bias, decays + t * heads * 4,
                    betas + t * heads * 4, hk, hv, dk,
                )  # fmt: skip
            # Nothing is written where the state in memory is as of target already.
            due = target if target > first else -1
            # All heads are replayed before a token of the window is written to the histories.
            for h in range(hv):
                _replay(
                    state_dtype, state_size, states + h * state_bytes,
                    memory + h * dk * dv * state_size, u_history, k_history, decay_history, slot,
                    entries, h, hk, hv, dk, dv, columns, first, start, due, grid, u,
                )  # fmt: skip
            _run_window(
                dtype, size, state_dtype, state_size, raw, mixed_stride, convolved, channels,
                decays, betas, heads, z, z_stride, norm_weight, out, token, eps, length, start,
                states, state_bytes, memory, conv, slot, conv_len, history, u_history, k_history,
                decay_history, entries, committed, target, due, grid, hk, hv, dk, dv, columns, u, o,
            )  # fmt: skip
        keep_alive(scratch)

    return gated_delta_step


KERNELS = KernelTable(
    ((dtype, state), _make_kernel(loaded, dtype.itemsize, loaded_state, state.itemsize))
    for dtype, loaded in FLOATS.items()
    for state, loaded_state in FLOATS.items()
    if loaded_state in (F32, BF16)
)
"""(dtype, dtype of the state in memory) -> kernel."""
