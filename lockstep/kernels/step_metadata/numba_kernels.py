# mypy: ignore-errors
"""Numba kernels of prepare_step and advance_rows: one call each, in place of some 40 of torch.

Arguments are addresses of contiguous tensors, and sizes. Names, shapes and integer widths are those
of contract.py.
"""

from lockstep.kernels.recurrent.numba_kernels import next_folded
from lockstep.kernels.simd.compiler import inline, kernel
from lockstep.kernels.simd.vectors import load_int, load_int32, store_int, store_int32


@inline
def _write_drafts(
    row, start, committed, window, history, length, table_drafts, max_drafts, limit, drafts
):
    """Write a row's drafts [window - 1] of a step, and append them to its tokens in history."""
    for i in range(window - 1):
        index = row * length + start + 1 + i
        draft = -1
        if i < committed - 1:
            draft = load_int(history, index)
        elif committed == 1 and i < limit and i < max_drafts:
            draft = load_int(table_drafts, row * max_drafts + i)
        store_int(drafts, i, draft)
    # Written after all forced tokens are read: these are at the same places.
    for i in range(window - 1):
        store_int(history, row * length + start + 1 + i, max(load_int(drafts, i), 0))


@kernel
def prepare_step(
    history, forced_end, computed, table_folded, table_drafts, draft_limit, table_pages,
    table_slots, row_ids, query_lens, sources, starts, committed, seq_lens, cu_seqlens, folded,
    page_table, state_slots, state_src, ends, drafts, sample_at, token_rows, positions, token_ids,
    slot_mapping, rows, tokens, query_len, page_size, length, max_drafts, columns,
):  # fmt: skip
    """Fill a step's metadata. query_lens: 0 for a uniform step."""
    window = query_len if query_lens == 0 else 1
    end = 0
    store_int32(cu_seqlens, 0, 0)
    for s in range(rows):
        row = load_int(row_ids, s)
        start = load_int32(computed, row)
        count = query_len if query_lens == 0 else load_int32(query_lens, s)
        num_committed = min(max(load_int32(forced_end, row) - start, 1), window)
        slot = load_int32(table_slots, row)
        source = load_int32(sources, s)
        end += count
        store_int32(starts, s, start)
        store_int32(committed, s, num_committed if query_lens == 0 else count)
        store_int32(seq_lens, s, start + count)
        store_int32(cu_seqlens, s + 1, end)
        store_int32(folded, s, load_int32(table_folded, row))
        store_int(state_slots, s, slot)
        store_int(state_src, s, source if source > 0 else slot)
        store_int(ends, s, max(end - 1, 0))
        for column in range(columns):
            page = load_int32(table_pages, row * columns + column)
            store_int32(page_table, s * columns + column, page)
        _write_drafts(
            row, start, num_committed, window, history, length, table_drafts, max_drafts,
            load_int32(draft_limit, row), drafts + s * (window - 1) * 8,
        )  # fmt: skip
        for i in range(window):
            store_int(sample_at, s * window + i, start + count + 1 - window + i)
    s = 0
    for token in range(tokens):
        # Tokens past the last row's end are padding, which belongs to the last row.
        while s < rows - 1 and load_int32(cu_seqlens, s + 1) <= token:
            s += 1
        row = load_int(row_ids, s)
        position = load_int32(starts, s) - load_int32(cu_seqlens, s) + token
        column = min(position // page_size, columns - 1)
        page = load_int32(page_table, s * columns + column)
        store_int(token_rows, token, s)
        store_int(positions, token, position)
        store_int(token_ids, token, load_int(history, row * length + min(position, length - 1)))
        store_int(slot_mapping, token, page * page_size + position % page_size)


@inline
def _folded_after(prompt, forced, seq_len, width, computed, folded, flush, grid):
    """Return the tokens that a row's recurrent state includes after the step."""
    if forced:
        return next_folded(computed, folded, 1, grid)
    if prompt:
        return computed
    return next_folded(seq_len - width, folded, flush, grid)


@inline
def _emit(history, length, first, forced_until, tokens, emitted, width):
    """Write a row's emitted tokens: those of the target, and forced ones in their places."""
    for i in range(width):
        source = load_int(tokens, i)
        if first + i < forced_until:
            source = load_int(history, min(first + i, length - 1))
        store_int(emitted, i, source)


@inline
def _accept(emitted, drafts, width):
    """Return (number of leading drafts that equal their emitted token, number of drafts)."""
    accepted = 0
    drafted = 0
    for i in range(width - 1):
        draft = load_int(drafts, i)
        drafted += draft >= 0
        if accepted == i and draft >= 0 and draft == load_int(emitted, i):
            accepted += 1
    return accepted, drafted


@inline
def _first_mismatch(emitted, tokens, forced):
    """Return the index of the first of `forced` emitted tokens that the target differs from, or
    -1."""
    for i in range(forced):
        if load_int(emitted, i) != load_int(tokens, i):
            return i
    return -1


@inline
def _commit(history, length, first, emitted, width, counts, count):
    """Write a row's emitted tokens to its history, and count the first `count` of them."""
    for i in range(width):
        token = load_int(emitted, i)
        store_int(history, min(first + i, length - 1), max(token, 0))
        if i < count and token >= 0:
            store_int32(counts, token, load_int32(counts, token) + 1)


@kernel
def advance_rows(
    history, prompt_len, forced_end, computed, table_folded, table_drafts, counts, row_ids, tokens,
    drafts, seq_lens, emitted, accepted, results, rows, width, length, max_drafts, vocab, flush,
    state_grid, prompt, forced,
):  # fmt: skip
    """Commit a step's results to the table, and write emitted, accepted and results."""
    for s in range(rows):
        row = load_int(row_ids, s)
        seq_len = load_int32(seq_lens, s)
        first = seq_len - (width - 1)
        emits = row > 0 and seq_len >= load_int32(prompt_len, row)
        forced_until = load_int32(forced_end, row) if emits else 0
        row_history = history + row * length * 8
        row_tokens = tokens + s * width * 8
        out = emitted + s * width * 8
        _emit(row_history, length, first, forced_until, row_tokens, out, width)
        num_accepted, drafted = _accept(out, drafts + s * (width - 1) * 8, width)
        num_emitted = num_accepted + 1
        mismatch = _first_mismatch(out, row_tokens, min(num_emitted, forced_until - first))
        if emits:
            row_counts = counts + row * vocab * 4
            _commit(row_history, length, first, out, width, row_counts, num_emitted)
        new_computed = first + num_accepted
        folded = load_int32(table_folded, row)
        folded = _folded_after(
            prompt, forced, seq_len, width, new_computed, folded, flush, state_grid
        )
        store_int32(computed, row, new_computed if row > 0 else 0)
        store_int32(table_folded, row, folded if row > 0 else 0)
        for i in range(max_drafts):
            store_int(table_drafts, row * max_drafts + i, -1)
        store_int32(accepted, s, num_accepted)
        row_results = results + s * (width + 4) * 8
        for i in range(width):
            store_int(row_results, i, load_int(out, i))
        store_int(row_results, width, num_accepted)
        store_int(row_results, width + 1, drafted)
        store_int(row_results, width + 2, mismatch)
        store_int(
            row_results, width + 3, load_int(row_tokens, mismatch if mismatch >= 0 else width - 1)
        )
