# mypy: ignore-errors
"""mamba2_chunk in Triton, on the absolute grid (the SSD form of Dao and Gu, 2024).

chunk_inputs_kernel is the convolution. scores_kernel makes, for each chunk and group, C B^T,
and the time steps and cumulated log decays of its heads. state_kernel carries the state from chunk
to chunk, in fp32 with numbers of its dtype in memory, one product a chunk, a program per (row,
head, block of P). out_kernel makes the outputs, a program per chunk again. No length is a
compile-time constant.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.convolution import convolve_chunk
from lockstep.kernels.mamba2.discretization import time_steps
from lockstep.kernels.recurrent.chunk_kernels import (
    load_across,
)


@triton.jit(do_not_specialize=["token_stride", "ring_slots"])
def chunk_inputs_kernel(
    mixed, taps, bias, conv, cu_seqlens, starts, state_src, chunks, heads, token_stride, ring_slots,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """One (chunk, block of channels): convolution and SiLU of GRID tokens, into heads [T, C]."""
    chunk = tl.program_id(0).to(tl.int64)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    offset = tl.load(chunks + chunk * 3 + 1)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = c < C
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    conv += tl.load(state_src + s).to(tl.int64) * ring_slots * C
    y = convolve_chunk(
        mixed, conv, taps, bias, c, live, begin, offset, count, tl.load(starts + s), ring_slots,
        token_stride, C, R, GRID,
    )  # fmt: skip
    lanes = tl.arange(0, GRID)
    at = (begin + offset + lanes)[:, None] * C + c[None, :]
    tl.store(heads + at, y, mask=(lanes < count)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["dt_stride", "shortest", "longest"])
def scores_kernel(
    heads, dt, a_log, dt_bias, cu_seqlens, chunks, scores, steps, growth, dt_stride, shortest,
    longest,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (chunk, group): scores = C B^T; steps and growth, the cumulated log decay, of its heads.

    Tokens past the end have a step of 0 and no decay.
    """
    chunk = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + tl.load(chunks + chunk * 3 + 1)
    t = tl.arange(0, GRID)
    i = tl.arange(0, BLOCK_K)
    live = t < count
    token = begin + t
    of_b = heads + token[:, None] * (2 * HK * K + HV * V) + HV * V + g * K + i[None, :]
    mask = live[:, None] & (i < K)[None, :]
    b = tl.load(of_b, mask=mask, other=0.0)
    c = tl.load(of_b + HK * K, mask=mask, other=0.0)
    seen = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    tl.store(scores + ((chunk * HK + g) * GRID + t[:, None]) * GRID + t[None, :], seen)
    for n in range(HV // HK):
        h = g * (HV // HK) + n
        raw = tl.load(dt + token * dt_stride + h, mask=live, other=0.0)
        step, decay = time_steps(raw, tl.load(a_log + h), tl.load(dt_bias + h), shortest, longest)
        at = (chunk * HV + h) * GRID + t
        tl.store(steps + at, tl.where(live, step, 0.0))
        tl.store(growth + at, tl.cumsum(tl.where(live, decay, 0.0), 0))


@triton.jit
def state_kernel(
    heads, steps, growth, recurrent, states, cu_seqlens, starts, state_src, state_slots,
    snapshot_slots, firsts, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One (row, head, block of P): the state carried from chunk to chunk, that before each left in
    `states`."""
    s = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    begin = tl.load(cu_seqlens + s).to(tl.int64)
    length = (tl.load(cu_seqlens + s + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots + s).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots + s).to(tl.int64)
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
    for n in range(tl.cdiv(length, GRID)):
        live = (n * GRID + t < length)[:, None]
        of_token = heads + (begin + n * GRID + t)[:, None] * (2 * HK * K + HV * V)
        block = (first + n) * HV + h
        tl.store(states + block * K * V + place, state.to(DTYPE), mask=inside)
        of_b = of_token + HV * V + h // (HV // HK) * K + i[None, :]
        b = tl.load(of_b, mask=live & (i < K)[None, :], other=0.0)
        x = tl.load(of_token + h * V + j[None, :], mask=live & (j < V)[None, :], other=0.0)
        u = x * tl.load(steps + block * GRID + t)[:, None]
        grown = tl.load(growth + block * GRID + t)
        end = tl.load(growth + block * GRID + GRID - 1)
        left = tl.trans(b * tl.exp(end - grown)[:, None])
        state = state * tl.exp(end) + tl.dot(left, u, input_precision=PRECISION)
        state = state.to(DTYPE).to(tl.float32)
        if (snapshot > 0) & (n + 1 == length // GRID):
            tl.store(recurrent + snapshot * slot_stride, state.to(DTYPE), mask=inside)
    tl.store(recurrent + slot * slot_stride, state.to(DTYPE), mask=inside)


@triton.jit
def out_kernel(
    heads, steps, growth, scores, states, d, cu_seqlens, chunks, out,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SECTOR: tl.constexpr,
):  # fmt: skip
    """One (chunk, head, block of P): outputs, from the state before it and its own tokens."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    count = tl.load(chunks + chunk * 3 + 2)
    if count == 0:
        return
    s = tl.load(chunks + chunk * 3)
    begin = tl.load(cu_seqlens + s).to(tl.int64) + tl.load(chunks + chunk * 3 + 1)
    g = h // (HV // HK)
    block = chunk * HV + h
    t = tl.arange(0, GRID)
    i = tl.arange(0, BLOCK_K)
    first = tl.program_id(2) * BLOCK_V
    j = first + tl.arange(0, BLOCK_V)
    live = t < count
    token = (begin + t)[:, None]
    channels: tl.constexpr = 2 * HK * K + HV * V
    of_token = heads + token * channels
    of_c = of_token + HV * V + (HK + g) * K + i[None, :]
    c = tl.load(of_c, mask=live[:, None] & (i < K)[None, :], other=0.0)
    grown = tl.load(growth + block * GRID + t)
    before = states + block * K * V + first
    state = load_across(before, V, i < K, V - first, BLOCK_K, BLOCK_V, SECTOR).to(tl.float32)
    y = tl.dot(c * tl.exp(grown)[:, None], state, input_precision=PRECISION)
    row = t[:, None]
    col = t[None, :]
    decay = tl.exp(tl.where(row >= col, grown[:, None] - grown[None, :], float("-inf")))
    seen = tl.load(scores + ((chunk * HK + g) * GRID + row) * GRID + col) * decay
    brought = heads + begin * channels + h * V + first
    x = load_across(brought, channels, live, V - first, GRID, BLOCK_V, SECTOR)
    u = x * tl.load(steps + block * GRID + t)[:, None]
    y += tl.dot(seen, u, input_precision=PRECISION)
    mask = live[:, None] & (j < V)[None, :]
    y += tl.load(d + h) * tl.load(of_token + h * V + j[None, :], mask=mask, other=0.0)
    tl.store(out + (token * HV + h) * V + j[None, :], y, mask=mask)
