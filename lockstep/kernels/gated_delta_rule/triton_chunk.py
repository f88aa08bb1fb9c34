# mypy: ignore-errors
"""gated_delta_chunk in Triton, on the absolute grid.

One program per (chunk, head) does what a chunk alone decides; one per (row, head, value block)
carries the fp32 state from chunk to chunk, two products a chunk; what a chunk puts out is then
again a program of its own. No length is a compile-time constant.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.gated_delta_rule import (
    L2_EPS,
    GatedDeltaState,
    GatedDeltaWeights,
    gated_delta_chunk,
)
from lockstep.kernels.gated_delta_rule.triton_inputs import (
    blocks_of,
    gates,
    head_channels,
    sizes_of,
    supports,
)
from lockstep.step import GRID

STATE_VALUES, OUT_VALUES = 32, 64
"""Values per program. H200, 2,048 tokens of 48 heads of 128 x 128: the state's walk takes 174 us
with 32, 221 with 64, 326 with 128; the output 97 us with 64, 106 with 32, 148 with 128."""
INPUT_WARPS, INNER_WARPS, STATE_WARPS, OUT_WARPS = 8, 4, 4, 4
"""Likewise: inputs 69 us with 8, 91 with 4; inner 223 with 4, 299 with 2, 381 with 8."""
SIDE = 16
"""Blocks of a chunk's triangle that are inverted by substitution; 64 took 1.1 ms instead of 0.2."""


def _precision(dtype: torch.dtype) -> str:
    """Of all products: three tf32 products per fp32 product where the model is fp32, else one.

    tf32 keeps 10 bits where bf16 keeps 7: 1.7e-3 relative error of a layer's output, at 27 % of the
    time (H200, 48 heads of 128 x 128).
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(
    cu_seqlens, state_slots, chunks, firsts, rows, BLOCK: tl.constexpr, GRID: tl.constexpr
):
    """One row: its first chunk's index; for each chunk (row, first token in the row, tokens)."""
    s, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    live = lanes < rows
    begin = tl.load(cu_seqlens + lanes, mask=live, other=0).to(tl.int32)
    length = tl.load(cu_seqlens + lanes + 1, mask=live, other=0).to(tl.int32) - begin
    length = tl.where(tl.load(state_slots + lanes, mask=live, other=0) != 0, length, 0)
    first = tl.sum(tl.where(lanes < s, tl.cdiv(length, GRID), 0), 0)
    mine = tl.sum(tl.where(lanes == s, length, 0), 0)
    tl.store(firsts + s, first)
    for chunk in range(tl.cdiv(mine, GRID)):
        line = chunks + (first + chunk) * 3
        tl.store(line, s)
        tl.store(line + 1, chunk * GRID)
        tl.store(line + 2, tl.minimum(mine - chunk * GRID, GRID))


@triton.jit
def _chunk_inputs_kernel(
    mixed, taps, conv, cu_seqlens, starts, state_src, chunks, heads, token_stride, lines,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """One (chunk, head of q, k or v): convolution, SiLU and l2 norm of GRID tokens."""
    chunk, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s, offset = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    c, live = head_channels(unit, tl.arange(0, BLOCK), HK, K, V)
    channels: tl.constexpr = 2 * HK * K + HV * V
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    start, lanes = tl.load(starts + s), tl.arange(0, GRID)
    conv += tl.load(state_src + s).to(tl.int64) * lines * channels
    total = tl.zeros((GRID, BLOCK), tl.float32)
    for j in tl.static_range(R + 1):
        token = offset + lanes + j - R
        here = ((token >= 0) & (lanes < count))[:, None] & live[None, :]
        before = ((token < 0) & (start > 0))[:, None] & live[None, :]
        line = (start + token + lines) % lines
        at = (begin + token)[:, None] * token_stride + c[None, :]
        new = tl.load(mixed + at, mask=here, other=0.0)
        old = tl.load(conv + line[:, None] * channels + c[None, :], mask=before, other=0.0)
        tap = tl.load(taps + j * channels + c, mask=live, other=0.0).to(tl.float32)
        total += tl.where((token < 0)[:, None], old, new).to(tl.float32) * tap[None, :]
    y = total / (1.0 + tl.exp(-total))
    if unit < 2 * HK:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(y * y, 1) + EPS))[:, None]
        y = tl.where(unit < HK, y * K**-0.5, y)
    at = (begin + offset + lanes)[:, None] * channels + c[None, :]
    tl.store(heads + at, y, mask=(lanes < count)[:, None] & live[None, :])


@triton.jit
def _unit_inverse(inner, SIDE: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr):
    """(I + inner)^-1 for strictly lower inner [GRID, GRID].

    Blocks of SIDE on the diagonal by forward substitution, all at once; with D their inverses and
    N = D times what is left of them, N^(GRID / SIDE) = 0, so (I - N)(I + N^2) D is the inverse.
    """
    blocks: tl.constexpr = GRID // SIDE
    t = tl.arange(0, GRID)
    row, col = t[:, None], t[None, :]
    b, r = tl.arange(0, blocks), tl.arange(0, SIDE)
    same = b[:, None, None, None] == b[None, None, :, None]
    tiles = tl.reshape(inner, (blocks, SIDE, blocks, SIDE))
    tiles = tl.sum(tl.where(same, tiles, 0.0), 2)
    solved = tl.zeros((blocks, SIDE, SIDE), tl.float32)
    for at in range(SIDE):
        above = tl.sum(tl.where(r[None, :, None] == at, tiles, 0.0), 1)
        line = tl.where(r[None, :] == at, 1.0, 0.0) - tl.sum(above[:, :, None] * solved, 1)
        solved = tl.where(r[None, :, None] == at, line[:, None, :], solved)
    wide = tl.where(same, solved[:, :, None, :], 0.0)
    d = tl.reshape(wide, (GRID, GRID))
    left = tl.where(row // SIDE > col // SIDE, inner, 0.0)
    n = tl.dot(d, left, input_precision=PRECISION)
    square = tl.dot(n, n, input_precision=PRECISION)
    cube = tl.dot(n, square, input_precision=PRECISION)
    series = tl.where(row == col, 1.0, 0.0) - n + square - cube
    return tl.dot(series, d, input_precision=PRECISION)


@triton.jit
def _chunk_inner_kernel(
    heads, b, a, a_log, dt_bias, cu_seqlens, chunks, u, w, scores, growth, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head): u and w of the WY form, causal scores, cumulated log decay."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s, offset = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + offset
    kh = h // (HV // HK)
    t, i, j = tl.arange(0, GRID), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    live, token = t < count, begin + t
    raw_a = tl.load(a + token * a_stride + h, mask=live, other=0.0)
    raw_b = tl.load(b + token * b_stride + h, mask=live, other=0.0)
    g, rate = gates(raw_a, raw_b, tl.load(a_log + h), tl.load(dt_bias + h))
    grown, rate = tl.cumsum(tl.where(live, g, 0.0), 0), tl.where(live, rate, 0.0)
    tl.store(growth + (chunk * HV + h) * GRID + t, grown)
    line = heads + token[:, None] * (2 * HK * K + HV * V)
    mask_k, mask_v = live[:, None] & (i < K)[None, :], live[:, None] & (j < V)[None, :]
    row, col = t[:, None], t[None, :]
    decay = tl.exp(tl.where(row >= col, grown[:, None] - grown[None, :], float("-inf")))
    k = tl.load(line + (HK + kh) * K + i[None, :], mask=mask_k, other=0.0)
    q = tl.load(line + kh * K + i[None, :], mask=mask_k, other=0.0)
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    tl.store(scores + ((chunk * HV + h) * GRID + row) * GRID + col, seen)
    inner = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * rate[:, None]
    inverse = _unit_inverse(tl.where(row > col, inner, 0.0), SIDE, GRID, PRECISION)
    new_w = tl.dot(inverse, k * (rate * tl.exp(grown))[:, None], input_precision=PRECISION)
    tl.store(w + (token[:, None] * HV + h) * K + i[None, :], new_w, mask=mask_k)
    v = tl.load(line + 2 * HK * K + h * V + j[None, :], mask=mask_v, other=0.0)
    new_u = tl.dot(inverse, v * rate[:, None], input_precision=PRECISION)
    tl.store(u + (token[:, None] * HV + h) * V + j[None, :], new_u, mask=mask_v)


@triton.jit
def _chunk_state_kernel(
    heads, u, w, growth, recurrent, states, cu_seqlens, starts, state_src, state_slots,
    snapshot_slots, firsts, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (row, value head, block of V): the state carried from chunk to chunk.

    Leaves the state before each chunk in `states`, and turns u into what the chunk writes.
    """
    s, h = tl.program_id(0) // HV, tl.program_id(0) % HV
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    length = (tl.load(cu_seqlens + s + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots + s).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots + s).to(tl.int64)
    kh, first = h // (HV // HK), tl.load(firsts + s).to(tl.int64)
    t, i = tl.arange(0, GRID), tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside, place = (i < K)[:, None] & (j < V)[None, :], i[:, None] * V + j[None, :]
    recurrent += h * K * V + place
    source = tl.load(state_src + s).to(tl.int64) * slot_stride
    state = tl.load(recurrent + source, mask=inside & (tl.load(starts + s) > 0), other=0.0)
    if (snapshot > 0) & (length < GRID):
        tl.store(recurrent + snapshot * slot_stride, state, mask=inside)
    for c in range(tl.cdiv(length, GRID)):
        live, token = c * GRID + t < length, (begin + c * GRID + t)[:, None]
        mask_k, mask_v = live[:, None] & (i < K)[None, :], live[:, None] & (j < V)[None, :]
        block = (first + c) * HV + h
        tl.store(states + block * K * V + place, state, mask=inside)
        old_w = tl.load(w + (token * HV + h) * K + i[None, :], mask=mask_k, other=0.0)
        written = u + (token * HV + h) * V + j[None, :]
        new = tl.load(written, mask=mask_v, other=0.0)
        new -= tl.dot(old_w, state, input_precision=PRECISION)
        tl.store(written, new, mask=mask_v)
        line = heads + token * (2 * HK * K + HV * V) + (HK + kh) * K + i[None, :]
        k = tl.load(line, mask=mask_k, other=0.0)
        grown = tl.load(growth + block * GRID + t)
        end = tl.load(growth + block * GRID + GRID - 1)
        left = tl.trans(k * tl.exp(end - grown)[:, None])
        state = state * tl.exp(end) + tl.dot(left, new, input_precision=PRECISION)
        if (snapshot > 0) & (c + 1 == length // GRID):
            tl.store(recurrent + snapshot * slot_stride, state, mask=inside)
    tl.store(recurrent + slot * slot_stride, state, mask=inside)


@triton.jit
def _chunk_out_kernel(
    heads, u, scores, growth, states, cu_seqlens, chunks, out,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head, block of V): what the state before the chunk and the chunk say."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s, offset = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + offset
    kh, block = h // (HV // HK), chunk * HV + h
    t, i = tl.arange(0, GRID), tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    live, token = t < count, (begin + t)[:, None]
    mask_k, mask_v = live[:, None] & (i < K)[None, :], live[:, None] & (j < V)[None, :]
    line = heads + token * (2 * HK * K + HV * V) + kh * K + i[None, :]
    q = tl.load(line, mask=mask_k, other=0.0)
    grown = tl.load(growth + block * GRID + t)
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(states + block * K * V + i[:, None] * V + j[None, :], mask=inside, other=0.0)
    o = tl.dot(q * tl.exp(grown)[:, None], state, input_precision=PRECISION)
    seen = tl.load(scores + (block * GRID + t[:, None]) * GRID + t[None, :])
    place = (token * HV + h) * V + j[None, :]
    new = tl.load(u + place, mask=mask_v, other=0.0)
    o += tl.dot(seen, new, input_precision=PRECISION)
    tl.store(out + place, o, mask=mask_v)


@triton.jit(do_not_specialize=["token_stride", "lines"])
def _chunk_conv_kernel(
    mixed, conv, cu_seqlens, starts, state_src, state_slots, snapshot_slots, token_stride, lines,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """One (row, block of channels): the last R raw inputs, at the end and at the grid point."""
    s = tl.program_id(0)
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    length = (tl.load(cu_seqlens + s + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots + s).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots + s).to(tl.int64)
    c, r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_R)[:, None]
    inside, start = (c < C) & (r < R), tl.load(starts + s)
    past = conv + tl.load(state_src + s).to(tl.int64) * lines * C + c
    grid = length // GRID * GRID
    mixed += begin * token_stride + c
    at_end, at_grid = r + length - R, r + grid - R
    end_line, grid_line = (start + at_end + lines) % lines, (start + at_grid + lines) % lines
    resumed = inside & (start > 0)
    old = tl.load(past + end_line * C, mask=resumed & (at_end < 0), other=0.0)
    new = tl.load(mixed + at_end * token_stride, mask=inside & (at_end >= 0), other=0.0)
    last = tl.where(at_end < 0, old, new)
    old = tl.load(past + grid_line * C, mask=resumed & (at_grid < 0), other=0.0)
    new = tl.load(mixed + at_grid * token_stride, mask=inside & (at_grid >= 0), other=0.0)
    tl.debug_barrier()
    tl.store(conv + slot * lines * C + end_line * C + c, last, mask=inside)
    kept = tl.where(at_grid < 0, old, new)
    place = conv + snapshot * lines * C + grid_line * C + c
    tl.store(place, kept, mask=inside & (snapshot > 0))


@gated_delta_chunk.backend("triton", supports=supports)
def gated_delta_chunk_triton(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """See lockstep.kernels.gated_delta_rule.gated_delta_chunk. No length is read on the host."""
    (tokens, channels), rows, sizes = mixed.shape, starts.shape[0], sizes_of(state)
    hk, hv, k, v = sizes["HK"], sizes["HV"], sizes["K"], sizes["V"]
    taps, lines = weights.conv.t().contiguous(), state.conv.shape[1]
    f32, history, most = torch.float32, taps.shape[0] - 1, tokens // GRID + rows
    out = torch.zeros(tokens, hv, v, dtype=f32, device=mixed.device)
    if not out.numel() or not rows:
        return out
    chunks, firsts = (
        torch.zeros(n, dtype=torch.int32, device=mixed.device) for n in (3 * most, rows)
    )
    shapes = ((tokens, channels), (tokens, hv, v), (tokens, hv, k), (most, hv, GRID, GRID))
    heads, u, w, scores = (torch.empty(n, dtype=f32, device=mixed.device) for n in shapes)
    growth = torch.empty(most, hv, GRID, dtype=f32, device=mixed.device)
    states = torch.empty(most, hv, k, v, dtype=f32, device=mixed.device)
    exact: dict[str, Any] = dict(GRID=GRID, enable_fp_fusion=False)
    precision = _precision(mixed.dtype)
    _plan_kernel[(rows,)](
        cu_seqlens, state_slots, chunks, firsts, rows, triton.next_power_of_2(rows), GRID
    )
    _chunk_inputs_kernel[(most, 2 * hk + hv)](
        mixed, taps, state.conv, cu_seqlens, starts, state_src, chunks, heads,
        mixed.stride(0), lines, **sizes, R=history,
        BLOCK=triton.next_power_of_2(max(k, v)), EPS=L2_EPS, num_warps=INPUT_WARPS, **exact,
    )  # fmt: skip
    _chunk_inner_kernel[(most, hv)](
        heads, b, a, weights.a_log, weights.dt_bias, cu_seqlens, chunks, u, w, scores, growth,
        b.stride(0), a.stride(0), **sizes, **blocks_of(sizes, 128), PRECISION=precision, SIDE=SIDE,
        num_warps=INNER_WARPS, **exact,
    )  # fmt: skip
    blocks = blocks_of(sizes, STATE_VALUES)
    _chunk_state_kernel[(rows * hv, triton.cdiv(v, blocks["BLOCK_V"]))](
        heads, u, w, growth, state.recurrent, states, cu_seqlens, starts, state_src, state_slots,
        snapshot_slots, firsts, state.recurrent.stride(0),
        **sizes, **blocks, PRECISION=precision, num_warps=STATE_WARPS, num_stages=1, **exact,
    )  # fmt: skip
    blocks = blocks_of(sizes, OUT_VALUES)
    _chunk_out_kernel[(most, hv, triton.cdiv(v, blocks["BLOCK_V"]))](
        heads, u, scores, growth, states, cu_seqlens, chunks, out,
        **sizes, **blocks, PRECISION=precision, num_warps=OUT_WARPS, **exact,
    )  # fmt: skip
    _chunk_conv_kernel[(rows, triton.cdiv(channels, 512))](
        mixed, state.conv, cu_seqlens, starts, state_src, state_slots, snapshot_slots,
        mixed.stride(0), lines, channels, history, 512,
        triton.next_power_of_2(history), GRID,
    )  # fmt: skip
    return out
