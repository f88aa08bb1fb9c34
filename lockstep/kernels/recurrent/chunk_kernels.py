# mypy: ignore-errors
"""The chunked form in Triton: kernels that every recurrence shares.

list_chunks_kernel finds the chunks of a prompt step. chunk_state_kernel is the inter-chunk pass: it
carries the state from chunk to chunk. save_raw_inputs_kernel keeps the convolution's history.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def list_chunks_kernel(
    cu_seqlens_ptr, state_slots_ptr, chunks_ptr, first_chunks_ptr, out_ptr, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """List the chunks of one row; fill the outputs of a row without a state slot with zeros.

    chunks [N, 3]: (row, first token in the row, tokens) of each chunk. first_chunks [S]: index of
    the row's first chunk. out [T, WIDTH].
    """
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    live = offs < rows
    begin = tl.load(cu_seqlens_ptr + offs, mask=live, other=0).to(tl.int32)
    length = tl.load(cu_seqlens_ptr + offs + 1, mask=live, other=0).to(tl.int32) - begin
    length = tl.where(tl.load(state_slots_ptr + offs, mask=live, other=0) != 0, length, 0)
    # Every CTA counts the chunks of all rows before its own: no exchange between CTAs, no atomics.
    first = tl.sum(tl.where(offs < row, tl.cdiv(length, GRID), 0), 0)
    row_length = tl.sum(tl.where(offs == row, length, 0), 0)
    tl.store(first_chunks_ptr + row, first)
    for chunk in range(tl.cdiv(row_length, GRID)):
        entry = chunks_ptr + (first + chunk) * 3
        tl.store(entry, row)
        tl.store(entry + 1, chunk * GRID)
        tl.store(entry + 2, tl.minimum(row_length - chunk * GRID, GRID))
    # Zeros are written here: in the kernel of the outputs they cost registers, and one CTA per SM.
    if tl.load(state_slots_ptr + row) == 0:
        at = tl.load(cu_seqlens_ptr + row).to(tl.int64) * WIDTH
        end = tl.load(cu_seqlens_ptr + row + 1).to(tl.int64) * WIDTH
        offs_zero = tl.arange(0, ZEROS)
        for block in range(at, end, ZEROS):
            tl.store(out_ptr + block + offs_zero, 0.0, mask=block + offs_zero < end)


@triton.jit(do_not_specialize=["token_stride", "conv_len"])
def save_raw_inputs_kernel(
    mixed_ptr, conv_history_ptr, cu_seqlens_ptr, starts_ptr, state_src_ptr, state_slots_ptr,
    snapshot_slots_ptr, token_stride, conv_len,
    C: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """Save the last R raw inputs of one (row, block of channels) to the history of its slot.

    Those before the row's last grid point go to the history of its snapshot, if it has one.
    """
    row = tl.program_id(0)
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots_ptr + row).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots_ptr + row).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = tl.arange(0, BLOCK_R)[:, None]
    live = (channel < C) & (r < R)
    start = tl.load(starts_ptr + row)
    past = conv_history_ptr + tl.load(state_src_ptr + row).to(tl.int64) * conv_len * C + channel
    grid = length // GRID * GRID
    mixed_ptr += begin * token_stride + channel
    at_end = r + length - R
    at_grid = r + grid - R
    end_index = (start + at_end + conv_len) % conv_len
    grid_index = (start + at_grid + conv_len) % conv_len
    # A row shorter than R tokens keeps raw inputs of the history that it resumed from.
    resumed = live & (start > 0)
    old = tl.load(past + end_index * C, mask=resumed & (at_end < 0), other=0.0)
    new = tl.load(mixed_ptr + at_end * token_stride, mask=live & (at_end >= 0), other=0.0)
    last = tl.where(at_end < 0, old, new)
    old = tl.load(past + grid_index * C, mask=resumed & (at_grid < 0), other=0.0)
    new = tl.load(mixed_ptr + at_grid * token_stride, mask=live & (at_grid >= 0), other=0.0)
    # The source slot may be the destination slot: all warps read before any warp writes.
    tl.debug_barrier()
    tl.store(conv_history_ptr + slot * conv_len * C + end_index * C + channel, last, mask=live)
    saved = tl.where(at_grid < 0, old, new)
    ptrs = conv_history_ptr + snapshot * conv_len * C + grid_index * C + channel
    tl.store(ptrs, saved, mask=live & (snapshot > 0))


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
def chunk_state_kernel(
    inputs_ptr, u_ptr, w_ptr, dt_ptr, g_cumsum_ptr, state_ptr, chunk_states_ptr, cu_seqlens_ptr,
    starts_ptr, state_src_ptr, state_slots_ptr, snapshot_slots_ptr, first_chunks_ptr, slot_stride,
    K_CHANNEL: tl.constexpr, V_CHANNEL: tl.constexpr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state of one (row, value head, block of V) from chunk to chunk.

    Delta rule: u and w are the WY representation, and u is overwritten by the values v_new = u - w
    S that the chunk writes; dt is None. Mamba-2: u and w are None, and v_new is dt x.

    inputs [T, C]: channels K_CHANNEL and following are the keys of all key heads, V_CHANNEL and
    following the values of all value heads. g_cumsum [N, HV, GRID]: log decay, cumulated from the
    chunk's first token. chunk_states [N, HV, K, V] receives the state before each chunk.
    """
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
        if w_ptr is not None:
            w = tl.load(w_ptr + (token * HV + head) * K + offs_k[None, :], mask=mask_k, other=0.0)
            u_ptrs = u_ptr + (token * HV + head) * V + offs_v[None, :]
            v_new = tl.load(u_ptrs, mask=mask_v, other=0.0)
            v_new -= tl.dot(w, state, input_precision=PRECISION)
            tl.store(u_ptrs, v_new, mask=mask_v)
        inputs_row = inputs_ptr + token * (2 * HK * K + HV * V)
        k_ptrs = inputs_row + (K_CHANNEL + k_head * K) + offs_k[None, :]
        k = tl.load(k_ptrs, mask=mask_k, other=0.0)
        if w_ptr is None:
            x = tl.load(
                inputs_row + (V_CHANNEL + head * V) + offs_v[None, :], mask=mask_v, other=0.0
            )
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
