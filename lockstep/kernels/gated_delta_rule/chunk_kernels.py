# mypy: ignore-errors
"""gated_delta_chunk in Triton, on the absolute grid.

chunk_inputs_kernel and chunk_inner_kernel make, for each chunk and head, what does not need the
state before it. chunk_state_kernel carries the state from chunk to chunk, in fp32 with numbers of
its dtype in memory, two products a chunk, with a program per (row, head, value block).
chunk_out_kernel makes the outputs, a program per chunk again. What lists the chunks and keeps raw
inputs stands in recurrent/chunk_kernels.py. No length is a compile-time constant.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.convolution import convolve_chunk
from lockstep.kernels.gated_delta_rule.gating import gates
from lockstep.kernels.recurrent.chunk_kernels import (
    load_across,
)


@triton.jit
def head_channels(unit, lanes, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Channels of head `unit` of [all q | all k | all v] at lanes, and which lanes it has."""
    is_value = unit >= 2 * HK
    first = tl.where(is_value, 2 * HK * K + (unit - 2 * HK) * V, unit * K)
    return first + lanes, lanes < tl.where(is_value, V, K)


@triton.jit
def chunk_inputs_kernel(
    mixed, taps, conv, cu_seqlens, starts, state_src, chunks, heads, token_stride, ring_slots,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """One (chunk, head of q, k or v): convolution, SiLU and l2 norm of GRID tokens."""
    chunk = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    offset = tl.load(chunks + chunk * 3 + 1)
    c, live = head_channels(unit, tl.arange(0, BLOCK), HK, K, V)
    channels: tl.constexpr = 2 * HK * K + HV * V
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    start = tl.load(starts + s)
    lanes = tl.arange(0, GRID)
    conv += tl.load(state_src + s).to(tl.int64) * ring_slots * channels
    y = convolve_chunk(
        mixed, conv, taps, None, c, live, begin, offset, count, start, ring_slots, token_stride,
        channels, R, GRID,
    )  # fmt: skip
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
    row = t[:, None]
    col = t[None, :]
    b = tl.arange(0, blocks)
    r = tl.arange(0, SIDE)
    same = b[:, None, None, None] == b[None, None, :, None]
    diagonal = tl.reshape(inner, (blocks, SIDE, blocks, SIDE))
    diagonal = tl.sum(tl.where(same, diagonal, 0.0), 2)
    solved = tl.zeros((blocks, SIDE, SIDE), tl.float32)
    for at in range(SIDE):
        above = tl.sum(tl.where(r[None, :, None] == at, diagonal, 0.0), 1)
        unit = tl.where(r[None, :] == at, 1.0, 0.0)
        new_row = unit - tl.sum(above[:, :, None] * solved, 1)
        solved = tl.where(r[None, :, None] == at, new_row[:, None, :], solved)
    wide = tl.where(same, solved[:, :, None, :], 0.0)
    d = tl.reshape(wide, (GRID, GRID))
    left = tl.where(row // SIDE > col // SIDE, inner, 0.0)
    n = tl.dot(d, left, input_precision=PRECISION)
    square = tl.dot(n, n, input_precision=PRECISION)
    cube = tl.dot(n, square, input_precision=PRECISION)
    series = tl.where(row == col, 1.0, 0.0) - n + square - cube
    return tl.dot(series, d, input_precision=PRECISION)


@triton.jit
def chunk_inner_kernel(
    heads, b, a, a_log, dt_bias, cu_seqlens, chunks, u, w, scores, growth, b_stride, a_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SIDE: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head): u and w of the WY form, causal scores, cumulated log decay."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    offset = tl.load(chunks + chunk * 3 + 1)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + offset
    kh = h // (HV // HK)
    t = tl.arange(0, GRID)
    i = tl.arange(0, BLOCK_K)
    j = tl.arange(0, BLOCK_V)
    live = t < count
    token = begin + t
    raw_a = tl.load(a + token * a_stride + h, mask=live, other=0.0)
    raw_b = tl.load(b + token * b_stride + h, mask=live, other=0.0)
    g, beta = gates(raw_a, raw_b, tl.load(a_log + h), tl.load(dt_bias + h))
    grown = tl.cumsum(tl.where(live, g, 0.0), 0)
    beta = tl.where(live, beta, 0.0)
    tl.store(growth + (chunk * HV + h) * GRID + t, grown)
    channels: tl.constexpr = 2 * HK * K + HV * V
    of_token = heads + token[:, None] * channels
    mask_k = live[:, None] & (i < K)[None, :]
    mask_v = live[:, None] & (j < V)[None, :]
    row = t[:, None]
    col = t[None, :]
    decay = tl.exp(tl.where(row >= col, grown[:, None] - grown[None, :], float("-inf")))
    k = tl.load(of_token + (HK + kh) * K + i[None, :], mask=mask_k, other=0.0)
    q = tl.load(of_token + kh * K + i[None, :], mask=mask_k, other=0.0)
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    tl.store(scores + ((chunk * HV + h) * GRID + row) * GRID + col, seen)
    inner = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    inverse = _unit_inverse(tl.where(row > col, inner, 0.0), SIDE, GRID, PRECISION)
    first = heads + begin * channels
    k = load_across(first + (HK + kh) * K, channels, live, K, GRID, BLOCK_K, SECTOR)
    new_w = tl.dot(inverse, k * (beta * tl.exp(grown))[:, None], input_precision=PRECISION)
    tl.store(w + (token[:, None] * HV + h) * K + i[None, :], new_w, mask=mask_k)
    v = load_across(first + 2 * HK * K + h * V, channels, live, V, GRID, BLOCK_V, SECTOR)
    new_u = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
    tl.store(u + (token[:, None] * HV + h) * V + j[None, :], new_u, mask=mask_v)


@triton.jit
def chunk_state_kernel(
    heads, u, w, growth, recurrent, states, cu_seqlens, starts, state_src, state_slots,
    snapshot_slots, firsts, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (row, value head, block of V): the state carried from chunk to chunk.

    Leaves the state before each chunk in `states`, and turns u into what the chunk writes.
    """
    s = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    length = (tl.load(cu_seqlens + s + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots + s).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots + s).to(tl.int64)
    kh = h // (HV // HK)
    first = tl.load(firsts + s).to(tl.int64)
    t = tl.arange(0, GRID)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (i < K)[:, None] & (j < V)[None, :]
    place = i[:, None] * V + j[None, :]
    recurrent += h * K * V + place
    source = tl.load(state_src + s).to(tl.int64) * slot_stride
    DTYPE: tl.constexpr = recurrent.dtype.element_ty
    state = tl.load(recurrent + source, mask=inside & (tl.load(starts + s) > 0), other=0.0)
    state = state.to(tl.float32)
    if (snapshot > 0) & (length < GRID):
        tl.store(recurrent + snapshot * slot_stride, state.to(DTYPE), mask=inside)
    for c in range(tl.cdiv(length, GRID)):
        live = c * GRID + t < length
        token = (begin + c * GRID + t)[:, None]
        mask_k = live[:, None] & (i < K)[None, :]
        mask_v = live[:, None] & (j < V)[None, :]
        block = (first + c) * HV + h
        tl.store(states + block * K * V + place, state.to(DTYPE), mask=inside)
        old_w = tl.load(w + (token * HV + h) * K + i[None, :], mask=mask_k, other=0.0)
        written = u + (token * HV + h) * V + j[None, :]
        new = tl.load(written, mask=mask_v, other=0.0)
        new -= tl.dot(old_w, state, input_precision=PRECISION)
        tl.store(written, new, mask=mask_v)
        of_k = heads + token * (2 * HK * K + HV * V) + (HK + kh) * K + i[None, :]
        k = tl.load(of_k, mask=mask_k, other=0.0)
        grown = tl.load(growth + block * GRID + t)
        end = tl.load(growth + block * GRID + GRID - 1)
        left = tl.trans(k * tl.exp(end - grown)[:, None])
        state = state * tl.exp(end) + tl.dot(left, new, input_precision=PRECISION)
        state = state.to(DTYPE).to(tl.float32)
        if (snapshot > 0) & (c + 1 == length // GRID):
            tl.store(recurrent + snapshot * slot_stride, state.to(DTYPE), mask=inside)
    tl.store(recurrent + slot * slot_stride, state.to(DTYPE), mask=inside)


@triton.jit
def chunk_out_kernel(
    heads, u, scores, growth, states, cu_seqlens, chunks, out,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SECTOR: tl.constexpr,
):  # fmt: skip
    """One (chunk, value head, block of V): outputs, from the state before it and its own tokens."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    offset = tl.load(chunks + chunk * 3 + 1)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + offset
    kh = h // (HV // HK)
    block = chunk * HV + h
    t = tl.arange(0, GRID)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    live = t < count
    token = (begin + t)[:, None]
    mask_k = live[:, None] & (i < K)[None, :]
    mask_v = live[:, None] & (j < V)[None, :]
    of_q = heads + token * (2 * HK * K + HV * V) + kh * K + i[None, :]
    q = tl.load(of_q, mask=mask_k, other=0.0)
    grown = tl.load(growth + block * GRID + t)
    first = tl.program_id(2) * BLOCK_V
    before = states + block * K * V + first
    state = load_across(before, V, i < K, V - first, BLOCK_K, BLOCK_V, SECTOR).to(tl.float32)
    o = tl.dot(q * tl.exp(grown)[:, None], state, input_precision=PRECISION)
    seen = tl.load(scores + (block * GRID + t[:, None]) * GRID + t[None, :])
    written = u + (begin * HV + h) * V + first
    new = load_across(written, HV * V, live, V - first, GRID, BLOCK_V, SECTOR)
    o += tl.dot(seen, new, input_precision=PRECISION)
    place = (token * HV + h) * V + j[None, :]
    tl.store(out + place, o, mask=mask_v)
