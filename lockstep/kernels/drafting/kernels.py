# mypy: ignore-errors
"""The drafters' ops in Triton: one launch per op, a CTA per row or per block of rows.

The lookups have two launches: a CTA per block of text finds matches, then a CTA per row copies the
best continuation. A row of the table is written by one CTA. The exception is the null row, to which
all CTAs write equal values. There are no atomics. Only the lookups' numbers of drafts and
blocks are specialised.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.paging import slot_at


@triton.jit(do_not_specialize=["rows", "tokens", "length", "window"])
def mtp_inputs_kernel(
    history, row_ids, token_rows, positions, cu_seqlens, accepted, next_tokens, last, sample_at,
    rows, tokens, length, window, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute mtp_inputs of BLOCK tokens and of BLOCK rows."""
    pdl_start()
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < tokens
    row = tl.load(row_ids + tl.load(token_rows + lane, mask=live, other=0))
    column = tl.minimum(tl.load(positions + lane, mask=live, other=0) + 1, length - 1)
    tl.store(next_tokens + lane, tl.load(history + row * length + column), mask=live)
    live = lane < rows
    end = tl.load(cu_seqlens + lane + 1, mask=live, other=1)
    index = tl.maximum(end - window + tl.load(accepted + lane, mask=live, other=0), 0)
    tl.store(last + lane, index.to(tl.int64), mask=live)
    tl.store(sample_at + lane, tl.load(positions + index, mask=live, other=0) + 2, mask=live)


@triton.jit(do_not_specialize=["rows", "max_drafts", "index", "shift", "columns", "page_size"])
def next_draft_step_kernel(
    computed, table_folded, drafts, row_ids, tokens, page_table, token_ids, positions, slot_mapping,
    starts, folded, seq_lens, cu_seqlens, token_rows, sample_at, rows, max_drafts, index, shift,
    columns, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store one draft token per row and advance the row's position (BLOCK rows per CTA)."""
    pdl_start()
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = s < rows
    row = tl.load(row_ids + s, mask=live, other=0)
    draft = tl.load(tokens + s, mask=live, other=0)
    tl.store(drafts + row * max_drafts + index, draft, mask=live)
    tl.store(token_ids + s, tl.maximum(draft, 0), mask=live)
    start = tl.load(computed + row) + index + shift
    pages = page_table + tl.where(live, s, 0).to(tl.int64) * columns
    tl.store(slot_mapping + s, slot_at(pages, start, columns, page_size), mask=live)
    tl.store(positions + s, start.to(tl.int64), mask=live)
    tl.store(sample_at + s, start.to(tl.int64) + 2 - shift, mask=live)
    tl.store(starts + s, start, mask=live)
    tl.store(folded + s, tl.load(table_folded + row), mask=live)
    tl.store(seq_lens + s, start + 1, mask=live)
    tl.store(token_rows + s, s.to(tl.int64), mask=live)
    tl.store(cu_seqlens + s, s, mask=s <= rows)  # rows + 1 entries


@triton.jit(
    do_not_specialize=["rows", "length", "width", "mask_token", "columns", "page_size"],
)
def block_step_kernel(
    computed, history, row_ids, page_table, token_ids, positions, slot_mapping, starts, seq_lens,
    cu_seqlens, token_rows, sample_at, rows, length, width, mask_token, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK tokens of the rows' draft blocks."""
    pdl_start()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = rows * width
    live = token < tokens
    s = tl.where(live, token // width, 0)
    order = token % width
    row = tl.load(row_ids + s, mask=live, other=0)
    first = tl.load(computed + row)
    position = first + order
    known = tl.load(history + row * length + first)
    tl.store(token_ids + token, tl.where(order == 0, known, mask_token), mask=live)
    tl.store(positions + token, position.to(tl.int64), mask=live)
    pages = page_table + s.to(tl.int64) * columns
    tl.store(slot_mapping + token, slot_at(pages, position, columns, page_size), mask=live)
    tl.store(token_rows + token, s.to(tl.int64), mask=live)
    first_token = live & (order == 0)
    tl.store(starts + s, first + width - 1, mask=first_token)
    tl.store(seq_lens + s, first + width, mask=first_token)
    tl.store(cu_seqlens + token, token, mask=token <= rows)  # rows + 1 entries
    drafted = live & (order > 0)
    tl.store(sample_at + s * (width - 1) + order - 1, position.to(tl.int64), mask=drafted)


@triton.jit
def _match_lengths(
    text, origin, size, first, limit, history, known, max_n, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the match length n at each of BLOCK positions of a circular text, at most max_n.

    A position `end` matches with n if the n tokens before it equal the last n of history[:known].
    text: buffer of `size` tokens whose oldest token is at origin. first: first position of the
    block. limit: positions from there on do not count.
    """
    # All positions of the block are compared backwards in parallel, token by token, until none of
    # them matches any more.
    end = first + tl.arange(0, BLOCK)
    equal = (end > 0) & (end < limit)
    n = tl.zeros((BLOCK,), tl.int32)
    buffer_end = (origin + end) % size
    back = 1
    active = tl.where(first < limit, max_n, 0)
    while active > 0:
        inside = equal & (end >= back)
        index = buffer_end - back + tl.where(buffer_end < back, size, 0)
        token = tl.load(text + index, mask=inside, other=-1)
        equal = inside & (token == tl.load(history + known - back))
        n += equal.to(tl.int32)
        back += 1
        more = (back <= max_n) & (back <= known)
        active = tl.max(equal.to(tl.int32), 0) * more.to(tl.int32)
    return n


@triton.jit
def _longest_match(
    text, origin, size, first, limit, history, known, shift, min_n, max_n, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the best match in BLOCK positions of a text: (n << 32 | end + shift), or 0.

    See _match_lengths.
    """
    n = _match_lengths(text, origin, size, first, limit, history, known, max_n, BLOCK)
    end = first + tl.arange(0, BLOCK)
    # One 64-bit maximum chooses the longest n-gram and then the latest position.
    match = (n.to(tl.int64) << 32) | (end + shift).to(tl.int64)
    return tl.max(tl.where(n >= min_n, match, 0), 0)


@triton.jit(do_not_specialize=["length", "num_texts", "min_n", "max_n"])
def match_kernel(
    history, computed, texts, oldest, row_ids, matches, length, num_texts, min_n, max_n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best match in one block of a row's history, or of texts.

    Blocks of texts come after those of the history. A match is an integer whose order ranks
    matches: n in the upper half, the position in [texts, history] in the lower. So the longest
    n-gram wins, then the row's own history, then the latest position.
    """
    pdl_start()
    row = tl.load(row_ids + tl.program_id(0))
    block = tl.program_id(1)
    known = tl.load(computed + row) + 1
    history += row * length
    min_n = tl.maximum(min_n, 1)
    history_blocks = tl.cdiv(length, BLOCK)
    if block < history_blocks:
        match = _longest_match(
            history, 0, length, block * BLOCK, known, history, known, num_texts, min_n, max_n, BLOCK
        )
    else:
        origin = tl.load(oldest).to(tl.int32)
        limit = tl.where(row > 0, num_texts, 0)
        first = (block - history_blocks) * BLOCK
        match = _longest_match(
            texts, origin, num_texts, first, limit, history, known, 0, min_n, max_n, BLOCK
        )
    tl.store(matches + tl.program_id(0) * tl.num_programs(1) + block, match)


@triton.jit(do_not_specialize=["length", "num_texts", "stride", "count", "blocks"])
def follow_kernel(
    history, computed, texts, oldest, drafts, row_ids, matches, length, num_texts, stride, count,
    blocks,
    BLOCKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the tokens after the best match of one row to its drafts."""
    pdl_start()
    row = tl.load(row_ids + tl.program_id(0))
    known = tl.load(computed + row) + 1
    history += row * length
    origin = tl.load(oldest).to(tl.int32)
    size = tl.maximum(num_texts, 1)
    lane = tl.arange(0, BLOCKS)
    match = tl.load(matches + tl.program_id(0) * blocks + lane, mask=lane < blocks, other=0)
    index = (tl.max(match, 0) & 0x7FFFFFFF).to(tl.int32)
    lane = tl.arange(0, LANES)
    in_history = index > num_texts
    real = in_history & (index - num_texts + lane < known)
    continuation = tl.load(history + index - num_texts + lane, mask=real, other=-1)
    real = (index > 0) & (index + lane < num_texts)
    from_texts = tl.load(texts + (origin + index + lane) % size, mask=real, other=-1)
    continuation = tl.where(in_history, continuation, from_texts)
    # A -1 ends a text: no draft follows it.
    end = tl.min(tl.where(continuation < 0, lane, LANES), 0)
    tl.store(
        drafts + row * stride + lane, tl.where(lane < end, continuation, -1), mask=lane < count
    )


@triton.jit(do_not_specialize=["length", "width", "min_n", "max_n"])
def predicted_match_kernel(
    history, computed, prompt_len, texts, text_lens, row_ids, matches, length, width, min_n, max_n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best match in one block of a row's predicted text.

    A match is an integer whose order ranks matches: n in the upper half; in the lower one the
    negated distance of its end from the answer's length, then whether the end is the later one.
    """
    pdl_start()
    row = tl.load(row_ids + tl.program_id(0))
    block = tl.program_id(1)
    known = tl.load(computed + row) + 1
    answer_len = known - tl.load(prompt_len + row)
    size = tl.load(text_lens + row)
    # A text's last position has no continuation.
    first = block * BLOCK
    longest = tl.minimum(max_n, answer_len)
    n = _match_lengths(
        texts + row * width, 0, tl.maximum(size, 1), first, size, history + row * length, known,
        longest, BLOCK,
    )  # fmt: skip
    distance = first + tl.arange(0, BLOCK) - answer_len
    is_later = (distance > 0).to(tl.int64)
    nearness = (0x3FFFFFFF - tl.abs(distance)).to(tl.int64)
    shortest = tl.maximum(tl.minimum(min_n, answer_len), 1)
    match = tl.where(n >= shortest, (n.to(tl.int64) << 32) | (nearness << 1) | is_later, 0)
    tl.store(matches + tl.program_id(0) * tl.num_programs(1) + block, tl.max(match, 0))


@triton.jit(do_not_specialize=["width", "stride", "count", "blocks"])
def predicted_follow_kernel(
    computed, prompt_len, texts, text_lens, drafts, row_ids, matches, width, stride, count, blocks,
    BLOCKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the tokens after the best match of one row to its drafts."""
    pdl_start()
    row = tl.load(row_ids + tl.program_id(0))
    answer_len = tl.load(computed + row) + 1 - tl.load(prompt_len + row)
    lane = tl.arange(0, BLOCKS)
    match = tl.load(matches + tl.program_id(0) * blocks + lane, mask=lane < blocks, other=0)
    best = tl.max(match, 0)
    rank = (best & 0x7FFFFFFF).to(tl.int32)
    distance = 0x3FFFFFFF - (rank >> 1)
    end = answer_len + tl.where(rank % 2 == 1, distance, -distance)
    end = tl.where(best > 0, end, tl.load(text_lens + row))
    lane = tl.arange(0, LANES)
    real = end + lane < tl.load(text_lens + row)
    continuation = tl.load(texts + row * width + end + lane, mask=real, other=-1)
    tl.store(drafts + row * stride + lane, continuation, mask=lane < count)
