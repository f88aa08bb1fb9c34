# mypy: ignore-errors
"""What prompt chunks of every recurrence need in Triton: to be listed, raw inputs to be kept."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def list_kernel(
    cu_seqlens, state_slots, chunks, firsts, out, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """One row: the index of its first chunk into firsts [S]; for each of its chunks (row, first
    token in the row, tokens) into chunks [chunks, 3]. Zeros into out [T, WIDTH] for a row whose
    state slot is 0, which has no chunks."""
    s = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    live = lanes < rows
    begin = tl.load(cu_seqlens + lanes, mask=live, other=0).to(tl.int32)
    length = tl.load(cu_seqlens + lanes + 1, mask=live, other=0).to(tl.int32) - begin
    length = tl.where(tl.load(state_slots + lanes, mask=live, other=0) != 0, length, 0)
    first = tl.sum(tl.where(lanes < s, tl.cdiv(length, GRID), 0), 0)
    mine = tl.sum(tl.where(lanes == s, length, 0), 0)
    tl.store(firsts + s, first)
    for chunk in range(tl.cdiv(mine, GRID)):
        entry = chunks + (first + chunk) * 3
        tl.store(entry, s)
        tl.store(entry + 1, chunk * GRID)
        tl.store(entry + 2, tl.minimum(mine - chunk * GRID, GRID))
    if tl.load(state_slots + s) == 0:
        at = tl.load(cu_seqlens + s).to(tl.int64) * WIDTH
        end = tl.load(cu_seqlens + s + 1).to(tl.int64) * WIDTH
        numbers = tl.arange(0, ZEROS)
        for place in range(at, end, ZEROS):
            tl.store(out + place + numbers, 0.0, mask=place + numbers < end)


@triton.jit(do_not_specialize=["token_stride", "ring_slots"])
def keep_kernel(
    mixed, conv, cu_seqlens, starts, state_src, state_slots, snapshot_slots, token_stride,
    ring_slots,
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
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    r = tl.arange(0, BLOCK_R)[:, None]
    inside = (c < C) & (r < R)
    start = tl.load(starts + s)
    past = conv + tl.load(state_src + s).to(tl.int64) * ring_slots * C + c
    grid = length // GRID * GRID
    mixed += begin * token_stride + c
    at_end = r + length - R
    at_grid = r + grid - R
    end_slot = (start + at_end + ring_slots) % ring_slots
    grid_slot = (start + at_grid + ring_slots) % ring_slots
    resumed = inside & (start > 0)
    old = tl.load(past + end_slot * C, mask=resumed & (at_end < 0), other=0.0)
    new = tl.load(mixed + at_end * token_stride, mask=inside & (at_end >= 0), other=0.0)
    last = tl.where(at_end < 0, old, new)
    old = tl.load(past + grid_slot * C, mask=resumed & (at_grid < 0), other=0.0)
    new = tl.load(mixed + at_grid * token_stride, mask=inside & (at_grid >= 0), other=0.0)
    tl.debug_barrier()
    tl.store(conv + slot * ring_slots * C + end_slot * C + c, last, mask=inside)
    kept = tl.where(at_grid < 0, old, new)
    place = conv + snapshot * ring_slots * C + grid_slot * C + c
    tl.store(place, kept, mask=inside & (snapshot > 0))


@triton.jit
def load_across(
    base, stride, live, width, ROWS: tl.constexpr, BLOCK: tl.constexpr, SECTOR: tl.constexpr
):
    """[ROWS, BLOCK], the first `width` columns of rows `stride` apart; 0 where not live [ROWS].

    A warp reads a sector of each of 16 rows. So where the numbers are a product's right operand,
    which stands transposed in shared memory, no two of its lanes write to one bank.
    """
    row = tl.arange(0, ROWS)[:, None, None]
    sector = tl.arange(0, BLOCK // SECTOR)[None, :, None]
    column = sector * SECTOR + tl.arange(0, SECTOR)[None, None, :]
    mask = live[:, None, None] & (column < width)
    return tl.reshape(tl.load(base + row * stride + column, mask=mask, other=0.0), (ROWS, BLOCK))
