# mypy: ignore-errors
"""The chunked form in Triton: kernels that every recurrence shares.

list_chunks_kernel finds the chunks of a prompt step. save_raw_inputs_kernel keeps the convolution's
history.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start


@triton.jit(do_not_specialize=["rows"])
def list_chunks_kernel(
    cu_seqlens_ptr, state_slots_ptr, chunks_ptr, first_chunks_ptr, out_ptr, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """List the chunks of one row; fill the outputs of a row without a state slot with zeros.

    chunks [N, 3]: (row, first token in the row, tokens) of each chunk. first_chunks [S]: index of
    the row's first chunk. out [T, WIDTH].
    """
    pdl_start()
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
    pdl_start()
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
