# mypy: ignore-errors
"""Numba kernels of the drafters' ops, one call each.

Arguments are addresses of contiguous tensors, and sizes. Names, shapes and integer widths are those
of contract.py.
"""

from lockstep.kernels.simd.compiler import inline, kernel
from lockstep.kernels.simd.vectors import load_int, load_int32, store_int, store_int32


@kernel
def mtp_inputs(
    history, row_ids, token_rows, positions, cu_seqlens, accepted, next_tokens, last, sample_at,
    rows, tokens, window, length,
):  # fmt: skip
    """Fill next_tokens, last and sample_at."""
    for token in range(tokens):
        row = load_int(row_ids, load_int(token_rows, token))
        column = min(load_int(positions, token) + 1, length - 1)
        store_int(next_tokens, token, load_int(history, row * length + column))
    for s in range(rows):
        index = max(load_int32(cu_seqlens, s + 1) + load_int32(accepted, s) - window, 0)
        store_int(last, s, index)
        store_int(sample_at, s, load_int(positions, index) + 2)


@kernel
def next_draft_step(
    computed, table_folded, drafts, row_ids, tokens, page_table, token_ids, positions, slot_mapping,
    token_rows, sample_at, starts, folded, seq_lens, cu_seqlens, rows, stride, columns, index,
    shift, page_size,
):  # fmt: skip
    """Store drafts, and fill the step that reads them. stride: elements between rows of drafts."""
    store_int32(cu_seqlens, 0, 0)
    for s in range(rows):
        row = load_int(row_ids, s)
        token = load_int(tokens, s)
        position = load_int32(computed, row) + index + shift
        column = min(position // page_size, columns - 1)
        page = load_int32(page_table, s * columns + column)
        store_int(drafts, row * stride + index, token)
        store_int(token_ids, s, max(token, 0))
        store_int(positions, s, position)
        store_int(slot_mapping, s, page * page_size + position % page_size)
        store_int(token_rows, s, s)
        store_int(sample_at, s, position + 2 - shift)
        store_int32(starts, s, position)
        store_int32(folded, s, load_int32(table_folded, row))
        store_int32(seq_lens, s, position + 1)
        store_int32(cu_seqlens, s + 1, s + 1)


@inline
def _token(texts, num_texts, oldest, known, index):
    """Return a token of the texts, the oldest first, followed by the row's known tokens."""
    if index >= num_texts:
        return load_int(known, index - num_texts)
    position = oldest + index
    return load_int(texts, position - num_texts if position >= num_texts else position)


@kernel
def ngram_lookup(
    history, computed, texts, oldest, drafts, row_ids, rows, length, num_texts, stride, count,
    min_n, max_n,
):  # fmt: skip
    """Write the rows' drafts [count]. stride: elements between rows of drafts."""
    first_text = load_int(oldest, 0)
    for s in range(rows):
        row = load_int(row_ids, s)
        known = history + row * length * 8
        num_known = load_int32(computed, row) + 1
        # The null row is not looked up in texts.
        in_texts = num_texts if row != 0 else 0
        total = in_texts + num_known
        longest = min(max_n, num_known)
        # An empty n-gram would match everywhere.
        best = max(min_n, 1) - 1
        match_end = 0
        # From the latest match on, so that only a longer one replaces it.
        for end in range(total - 1, 0, -1):
            n = 0
            while n < min(longest, end) and _token(
                texts, in_texts, first_text, known, end - 1 - n
            ) == load_int(known, num_known - 1 - n):
                n += 1
            if n > best:
                best = n
                match_end = end
                if n == longest:
                    break
        row_drafts = drafts + row * stride * 8
        ended = match_end == 0
        for i in range(count):
            draft = -1
            if not ended and match_end + i < total:
                draft = _token(texts, in_texts, first_text, known, match_end + i)
            # A text ends by -1: no draft follows it.
            ended = ended or draft < 0
            store_int(row_drafts, i, -1 if ended else draft)
