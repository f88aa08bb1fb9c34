# mypy: ignore-errors
"""prepare_step and advance_rows in Triton: one launch per op, a CTA per row or block of tokens.

A row of the table is written by one CTA. The exception is the null row, to which all CTAs write
equal values. There are no atomics. Only the window width is specialised, so that a new batch shape
compiles nothing.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.history import next_folded
from lockstep.kernels.device.paging import slot_at


@triton.jit
def _row_bounds(query_lens, query_len, s, BLOCK: tl.constexpr):
    """Return the first token in the step and the number of tokens of row s."""
    first = s * query_len
    length = query_len
    if query_lens is not None:
        # Each CTA adds the lengths of all rows before it: no scan kernel, no second launch.
        lengths = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, s, BLOCK):
            before = begin + tl.arange(0, BLOCK)
            lengths += tl.load(query_lens + before, mask=before < s, other=0)
        first = tl.sum(lengths, 0)
        length = tl.load(query_lens + s)
    return first, length


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "query_len", "window", "length", "max_drafts", "columns", "page_size",
    ]
)  # fmt: skip
def prepare_step_kernel(
    row_ids, query_lens, sources, history, forced_end, computed, table_folded, table_drafts,
    draft_limit, table_pages, table_slots,
    starts, committed, seq_lens, cu_seqlens, state_slots, state_src, folded, page_table, drafts,
    sample_at, token_rows, positions, token_ids, slot_mapping, ends,
    rows, tokens, query_len, window, length, max_drafts, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK tokens and BLOCK page-table columns of one row; its first CTA writes scalars."""
    pdl_start()
    s = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ids + s)
    start = tl.load(computed + row)
    first, count = _row_bounds(query_lens, query_len, s, BLOCK)
    history = history + row * length
    table_drafts = table_drafts + row * max_drafts
    table_pages = table_pages + row * columns
    # Padding tokens of the step belong to its last row.
    live = lane < tl.where(s == rows - 1, tokens - first, count)
    position = start + lane
    drafted = live & (lane > 0) & (lane < window)
    num_committed = count
    if query_lens is None:
        remaining = tl.load(forced_end + row) - start
        num_committed = tl.minimum(tl.maximum(remaining, 1), query_len)
    # Forced tokens are drafts that the history has already. A row with any has no other drafts.
    limit = tl.where(num_committed > 1, 0, tl.load(draft_limit + row))
    is_proposed = drafted & (lane <= tl.minimum(limit, max_drafts))
    draft = tl.load(table_drafts + lane - 1, mask=is_proposed, other=-1)
    token = tl.load(history + tl.minimum(position, length - 1), mask=live, other=0)
    draft = tl.where(drafted & (lane < num_committed), token, draft)
    slot = slot_at(table_pages, tl.where(live, position, 0), columns, page_size)
    tl.store(history + position, tl.maximum(draft, 0), mask=drafted)
    tl.store(drafts + s * (window - 1) + lane - 1, draft, mask=drafted)
    tl.store(token_ids + first + lane, tl.where(drafted, tl.maximum(draft, 0), token), mask=live)
    tl.store(positions + first + lane, position.to(tl.int64), mask=live)
    tl.store(token_rows + first + lane, tl.zeros_like(slot) + s, mask=live)
    tl.store(slot_mapping + first + lane, slot, mask=live)
    seq_len = start + count
    tl.store(
        sample_at + s * window + lane, (seq_len - window + 1 + lane).to(tl.int64), lane < window
    )
    page = tl.load(table_pages + lane, mask=lane < columns, other=0)
    tl.store(page_table + s.to(tl.int64) * columns + lane, page, mask=lane < columns)
    if tl.program_id(1) == 0:
        row_slot = tl.load(table_slots + row)
        source = tl.load(sources + s)
        tl.store(starts + s, start)
        tl.store(committed + s, num_committed)
        tl.store(seq_lens + s, seq_len)
        tl.store(cu_seqlens + s + 1, first + count)
        tl.store(state_slots + s, row_slot.to(tl.int64))
        tl.store(state_src + s, tl.where(source > 0, source, row_slot).to(tl.int64))
        tl.store(folded + s, tl.load(table_folded + row))
        tl.store(ends + s, tl.maximum(first + count - 1, 0).to(tl.int64))
        if s == 0:
            tl.store(cu_seqlens, 0)


@triton.jit(do_not_specialize=["length", "max_drafts", "vocab", "flush", "state_grid"])
def advance_rows_kernel(
    row_ids, tokens, drafts, seq_lens, history, prompt_len, forced_end, computed, table_folded,
    table_drafts, counts, emitted, accepted, results,
    length, max_drafts, vocab, flush, state_grid,
    PROMPT: tl.constexpr, FORCED: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Commit the results of one row."""
    pdl_start()
    s = tl.program_id(0)
    lane = tl.arange(0, LANES)
    row = tl.load(row_ids + s)
    live = lane < W
    target = tl.load(tokens + s * W + lane, mask=live, other=0)
    draft = tl.load(drafts + s * (W - 1) + lane, mask=lane < W - 1, other=-1)
    seq_len = tl.load(seq_lens + s)
    first = seq_len - (W - 1)
    real = row > 0
    emits = real & (seq_len >= tl.load(prompt_len + row))
    column = tl.minimum(first + lane, length - 1)
    # A forced token is emitted whatever the target's token is.
    is_forced = live & emits & (first + lane < tl.load(forced_end + row))
    old = tl.load(history + row * length + column, mask=is_forced, other=0)
    token = tl.where(is_forced, old, target)
    equal = (lane < W - 1) & (draft == token) & (draft >= 0)
    num_accepted = tl.min(tl.where(equal, W - 1, lane), 0)
    folded = first + num_accepted
    if FORCED:
        folded = next_folded(first + num_accepted, tl.load(table_folded + row), 1, state_grid)
    elif not PROMPT:
        folded = next_folded(first - 1, tl.load(table_folded + row), flush, state_grid)
    tl.store(computed + row, tl.where(real, first + num_accepted, 0))
    tl.store(table_folded + row, tl.where(real, folded, 0))
    for begin in range(0, max_drafts, LANES):
        index = begin + lane
        tl.store(table_drafts + row * max_drafts + index, -1, mask=index < max_drafts)
    tl.store(emitted + s * W + lane, token, mask=live)
    tl.store(accepted + s, num_accepted)
    differs = live & emits & (lane <= num_accepted) & (token != target)
    mismatch = tl.min(tl.where(differs, lane, W), 0)
    chosen = tl.sum(tl.where(lane == tl.minimum(mismatch, W - 1), target, 0), 0)
    results += s * (W + 4)
    tl.store(results + lane, token, mask=live)
    tl.store(results + W, num_accepted.to(tl.int64))
    tl.store(results + W + 1, tl.sum((draft >= 0).to(tl.int64), 0))
    tl.store(results + W + 2, tl.where(mismatch < W, mismatch, -1).to(tl.int64))
    tl.store(results + W + 3, chosen)
    tl.store(history + row * length + column, tl.maximum(token, 0), mask=live & emits)
    # A token that occurs twice in the window is counted by both of its lanes. Both store the same
    # sum, so the order of the stores does not matter.
    counted = emits & (lane <= num_accepted) & (token >= 0)
    equal = (token[:, None] == token[None, :]) & (lane <= num_accepted)[None, :]
    counts += row * vocab + token
    n = tl.load(counts, mask=counted, other=0) + tl.sum(equal.to(tl.int32), 1)
    tl.store(counts, n, mask=counted)
