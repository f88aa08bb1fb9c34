# mypy: ignore-errors
"""mamba2_chunk in Triton: the chunked (SSD) form on the absolute 64-token grid.

1. chunk_inputs_kernel: convolution and SiLU, per (chunk, block of channels).
2. chunk_scores_kernel, intra-chunk: C B^T, time steps and cumulated log decays, per (chunk, group).
   Neither kernel needs a state, so all chunks run in parallel.
3. chunk_state_kernel, inter-chunk: carries the state from chunk to chunk, per (row, head, block of
   P).
4. chunk_output_kernel: outputs from the state before the chunk and the chunk's own tokens, again
   in parallel over chunks.

No length is a compile-time constant. Names are those of lockstep.kernels.recurrent: HK = G groups,
HV = H heads, K = N state dims, V = P channels of a head.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.convolution import convolve_chunk
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.mamba2.discretization import discretize


@triton.jit(do_not_specialize=["token_stride", "conv_len"])
def chunk_inputs_kernel(
    mixed_ptr, conv_weight_ptr, bias_ptr, conv_history_ptr, cu_seqlens_ptr, starts_ptr,
    state_src_ptr, chunks_ptr, inputs_ptr, token_stride, conv_len,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Convolve GRID tokens of one (chunk, block of channels), with SiLU, into inputs [T, C]."""
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    # The host launches the maximum number of chunks, since it does not know the lengths.
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    offset = tl.load(chunks_ptr + chunk * 3 + 1)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel_mask = channel < C
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    conv_history_ptr += tl.load(state_src_ptr + row).to(tl.int64) * conv_len * C
    y = convolve_chunk(
        mixed_ptr, conv_history_ptr, conv_weight_ptr, bias_ptr, channel, channel_mask, begin,
        offset, count, tl.load(starts_ptr + row), conv_len, token_stride, C, R, GRID,
    )  # fmt: skip
    offs_t = tl.arange(0, GRID)
    offs = (begin + offset + offs_t)[:, None] * C + channel[None, :]
    tl.store(inputs_ptr + offs, y, mask=(offs_t < count)[:, None] & channel_mask[None, :])


@triton.jit(do_not_specialize=["dt_stride", "dt_min", "dt_max"])
def chunk_scores_kernel(
    inputs_ptr, raw_dt_ptr, a_log_ptr, dt_bias_ptr, cu_seqlens_ptr, chunks_ptr, scores_ptr, dt_ptr,
    g_cumsum_ptr, dt_stride, dt_min, dt_max,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scores = C B^T of one (chunk, group), and dt and g_cumsum of the group's heads.

    scores [N, G, GRID, GRID] without mask or decay, since decays differ between heads. dt, g_cumsum
    [N, H, GRID]: time step, and log decay cumulated from the chunk's first token.
    """
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64) + tl.load(chunks_ptr + chunk * 3 + 1)
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    token_mask = offs_t < count
    token = begin + offs_t
    inputs_rows = inputs_ptr + token[:, None] * (2 * HK * K + HV * V)
    b_ptrs = inputs_rows + HV * V + group * K + offs_k[None, :]
    mask = token_mask[:, None] & (offs_k < K)[None, :]
    b = tl.load(b_ptrs, mask=mask, other=0.0)
    c = tl.load(b_ptrs + HK * K, mask=mask, other=0.0)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    scores_rows = scores_ptr + ((chunk * HK + group) * GRID + offs_t[:, None]) * GRID
    tl.store(scores_rows + offs_t[None, :], scores)
    for n in range(HV // HK):
        head = group * (HV // HK) + n
        raw_dt = tl.load(raw_dt_ptr + token * dt_stride + head, mask=token_mask, other=0.0)
        dt, log_decay = discretize(
            raw_dt, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head), dt_min, dt_max
        )
        # Tokens past the end: a time step of 0 and no decay make them exact no-ops on the state.
        offs = (chunk * HV + head) * GRID + offs_t
        tl.store(dt_ptr + offs, tl.where(token_mask, dt, 0.0))
        tl.store(g_cumsum_ptr + offs, tl.cumsum(tl.where(token_mask, log_decay, 0.0), 0))


@triton.jit
def chunk_state_kernel(
    inputs_ptr, dt_ptr, g_cumsum_ptr, state_ptr, chunk_states_ptr, cu_seqlens_ptr, starts_ptr,
    state_src_ptr, state_slots_ptr, snapshot_slots_ptr, first_chunks_ptr, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state of one (row, head, block of V) from chunk to chunk.

    g_cumsum [N, HV, GRID]: log decay, cumulated from the chunk's first token. chunk_states
    [N, HV, K, V] receives the state before each chunk.
    """
    pdl_start()
    row = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots_ptr + row).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots_ptr + row).to(tl.int64)
    k_head = head // (HV // HK)
    first_chunk = tl.load(first_chunks_ptr + row).to(tl.int64)
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_state = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    state_offs = offs_k[:, None] * V + offs_v[None, :]
    state_ptr += head * K * V + state_offs
    source = tl.load(state_src_ptr + row).to(tl.int64) * slot_stride
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    resumed = in_state & (tl.load(starts_ptr + row) > 0)
    state = tl.load(state_ptr + source, mask=resumed, other=0.0)
    state = state.to(tl.float32)
    # A row without a whole chunk has its last grid point at its start.
    if (snapshot > 0) & (length < GRID):
        tl.store(state_ptr + snapshot * slot_stride, state.to(DTYPE), mask=in_state)
    for c in range(tl.cdiv(length, GRID)):
        token_mask = (c * GRID + offs_t < length)[:, None]
        token = (begin + c * GRID + offs_t)[:, None]
        mask_k = token_mask & (offs_k < K)[None, :]
        mask_v = token_mask & (offs_v < V)[None, :]
        block = (first_chunk + c) * HV + head
        tl.store(chunk_states_ptr + block * K * V + state_offs, state.to(DTYPE), mask=in_state)
        inputs_row = inputs_ptr + token * (2 * HK * K + HV * V)
        k_ptrs = inputs_row + (HV * V + k_head * K) + offs_k[None, :]
        k = tl.load(k_ptrs, mask=mask_k, other=0.0)
        x = tl.load(inputs_row + head * V + offs_v[None, :], mask=mask_v, other=0.0)
        v_new = x * tl.load(dt_ptr + block * GRID + offs_t)[:, None]
        g_cumsum = tl.load(g_cumsum_ptr + block * GRID + offs_t)
        g_last = tl.load(g_cumsum_ptr + block * GRID + GRID - 1)
        k_decayed = tl.trans(k * tl.exp(g_last - g_cumsum)[:, None])
        state = state * tl.exp(g_last) + tl.dot(k_decayed, v_new, input_precision=PRECISION)
        # Every chunk ends on the absolute grid or at the row's end, so rounding here does not
        # depend on how a prompt is split into steps.
        state = state.to(DTYPE).to(tl.float32)
        if (snapshot > 0) & (c + 1 == length // GRID):
            tl.store(state_ptr + snapshot * slot_stride, state.to(DTYPE), mask=in_state)
    tl.store(state_ptr + slot * slot_stride, state.to(DTYPE), mask=in_state)


@triton.jit
def load_by_sectors(
    ptr, row_stride, row_mask, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, SECTOR: tl.constexpr
):
    """Load a tile [ROWS, BLOCK] of rows row_stride apart: `width` columns, 0 for masked rows."""
    # A warp loads one sector of each of 16 rows. A right operand of tl.dot is stored transposed in
    # shared memory; with this order of threads no two lanes of a warp write to the same bank.
    row = tl.arange(0, ROWS)[:, None, None]
    sector = tl.arange(0, BLOCK // SECTOR)[None, :, None]
    column = sector * SECTOR + tl.arange(0, SECTOR)[None, None, :]
    mask = row_mask[:, None, None] & (column < width)
    ptrs = ptr + row * row_stride + column
    return tl.reshape(tl.load(ptrs, mask=mask, other=0.0), (ROWS, BLOCK))


@triton.jit
def chunk_output_kernel(
    inputs_ptr, dt_ptr, g_cumsum_ptr, scores_ptr, chunk_states_ptr, d_ptr, cu_seqlens_ptr,
    chunks_ptr, out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SECTOR: tl.constexpr,
):  # fmt: skip
    """Compute outputs [T, H, P] of one (chunk, head, block of P).

    The inter-chunk part is C exp(g_cumsum) S, the intra-chunk part scores * decay @ (dt x), the
    skip D x.
    """
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64) + tl.load(chunks_ptr + chunk * 3 + 1)
    group = head // (HV // HK)
    block = chunk * HV + head
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    first_v = tl.program_id(2) * BLOCK_V
    offs_v = first_v + tl.arange(0, BLOCK_V)
    token_mask = offs_t < count
    token = (begin + offs_t)[:, None]
    C: tl.constexpr = 2 * HK * K + HV * V
    inputs_rows = inputs_ptr + token * C
    c_ptrs = inputs_rows + HV * V + (HK + group) * K + offs_k[None, :]
    c = tl.load(c_ptrs, mask=token_mask[:, None] & (offs_k < K)[None, :], other=0.0)
    g_cumsum = tl.load(g_cumsum_ptr + block * GRID + offs_t)
    states = chunk_states_ptr + block * K * V + first_v
    state = load_by_sectors(
        states, V, offs_k < K, V - first_v, BLOCK_K, BLOCK_V, SECTOR
    ).to(tl.float32)  # fmt: skip
    y = tl.dot(c * tl.exp(g_cumsum)[:, None], state, input_precision=PRECISION)
    t_row = offs_t[:, None]
    t_col = offs_t[None, :]
    # The mask is applied before exp: differences above the diagonal are positive and may overflow.
    log_decay = tl.where(t_row >= t_col, g_cumsum[:, None] - g_cumsum[None, :], float("-inf"))
    decay = tl.exp(log_decay)
    scores = tl.load(scores_ptr + ((chunk * HK + group) * GRID + t_row) * GRID + t_col) * decay
    x_rows = inputs_ptr + begin * C + head * V + first_v
    x = load_by_sectors(x_rows, C, token_mask, V - first_v, GRID, BLOCK_V, SECTOR)
    dt_x = x * tl.load(dt_ptr + block * GRID + offs_t)[:, None]
    y += tl.dot(scores, dt_x, input_precision=PRECISION)
    mask = token_mask[:, None] & (offs_v < V)[None, :]
    d = tl.load(d_ptr + head)
    y += d * tl.load(inputs_rows + head * V + offs_v[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + (token * HV + head) * V + offs_v[None, :], y, mask=mask)
