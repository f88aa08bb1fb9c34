"""The table's ops in Triton: one launch each, a program per row or per block of tokens.

A row of the table belongs to one program, but for line 0, where all that programs write is the
same. Nothing is added atomically and no argument but a window's width, and the drafts that
lookup makes, is specialised.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.table import (
    DraftTensors,
    Lines,
    StepTensors,
    advance_rows,
    draft_step,
    follow,
    lookup,
    prepare_step,
)

BLOCK, ROW_BLOCK, HISTORY_BLOCK = 256, 64, 2048


@triton.jit
def _row_bounds(query_lens, query_len, s, BLOCK: tl.constexpr):
    """First token in the step, and tokens, of row s."""
    first, length = s * query_len, query_len
    if query_lens is not None:
        lengths = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, s, BLOCK):
            before = begin + tl.arange(0, BLOCK)
            lengths += tl.load(query_lens + before, mask=before < s, other=0)
        first, length = tl.sum(lengths, 0), tl.load(query_lens + s)
    return first, length


@triton.jit
def _slot(pages, position, columns, page_size):
    """The slot of each position under a line of a page table."""
    column = tl.minimum(position // page_size, columns - 1)
    return tl.load(pages + column).to(tl.int64) * page_size + position % page_size


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "query_len", "window", "length", "most_drafts", "columns", "page_size",
    ]
)  # fmt: skip
def _prepare_kernel(
    row_ids, query_lens, sources, history, computed, left, kept, tables, state_slots,
    starts, seq_lens, cu_seqlens, slots, state_src, pending, pages, drafts, sample_at,
    token_rows, positions, token_ids, slot_mapping, ends,
    rows, tokens, query_len, window, length, most_drafts, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens and BLOCK page columns of one row; its numbers, by its first program."""
    s, lane = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ids + s)
    start = tl.load(computed + row)
    first, count = _row_bounds(query_lens, query_len, s, BLOCK)
    history, kept, tables = history + row * length, kept + row * most_drafts, tables + row * columns
    live = lane < tl.where(s == rows - 1, tokens - first, count)
    position = start + lane
    drafted = live & (lane > 0) & (lane < window)
    draft = tl.load(kept + lane - 1, mask=drafted, other=-1)
    token = tl.load(history + tl.minimum(position, length - 1), mask=live & ~drafted, other=0)
    slot = _slot(tables, tl.where(live, position, 0), columns, page_size)
    tl.store(history + position, tl.maximum(draft, 0), mask=drafted)
    tl.store(drafts + s * (window - 1) + lane - 1, draft, mask=drafted)
    tl.store(token_ids + first + lane, tl.where(drafted, tl.maximum(draft, 0), token), mask=live)
    tl.store(positions + first + lane, position.to(tl.int64), mask=live)
    tl.store(token_rows + first + lane, tl.zeros_like(slot) + s, mask=live)
    tl.store(slot_mapping + first + lane, slot, mask=live)
    known = start + count
    tl.store(sample_at + s * window + lane, (known - window + 1 + lane).to(tl.int64), lane < window)
    page = tl.load(tables + lane, mask=lane < columns, other=0)
    tl.store(pages + s.to(tl.int64) * columns + lane, page, mask=lane < columns)
    if tl.program_id(1) == 0:
        own, source = tl.load(state_slots + row), tl.load(sources + s)
        tl.store(starts + s, start)
        tl.store(seq_lens + s, known)
        tl.store(cu_seqlens + s + 1, first + count)
        tl.store(slots + s, own.to(tl.int64))
        tl.store(state_src + s, tl.where(source > 0, source, own).to(tl.int64))
        tl.store(pending + s, tl.load(left + row).to(tl.int64))
        tl.store(ends + s, tl.maximum(first + count - 1, 0).to(tl.int64))
        if s == 0:
            tl.store(cu_seqlens, 0)


@prepare_step.backend("triton", supports=gpu_trait)
def prepare_step_triton(
    lines: Lines,
    row_ids: Tensor,
    query_lens: Tensor | None,
    state_src: Tensor,
    tokens: int,
    query_len: int,
    page_size: int,
) -> StepTensors:
    """See lockstep.kernels.table.prepare_step."""
    rows, columns = row_ids.shape[0], lines.page_table.shape[1]
    window = query_len if query_lens is None else 1

    def ints(*shape: int) -> Tensor:
        return lines.computed.new_empty(shape)

    def longs(*shape: int) -> Tensor:
        return row_ids.new_empty(shape)

    out = StepTensors(
        *(ints(rows), ints(rows), ints(rows + 1)),
        *(longs(rows) for _ in range(3)),
        *(ints(rows, columns), longs(rows, window - 1), longs(rows, window)),
        *(longs(tokens) for _ in range(4)),
        longs(rows),
    )
    widest = max(query_len if query_lens is None else tokens, columns)
    _prepare_kernel[(rows, triton.cdiv(widest, BLOCK))](
        row_ids, query_lens, state_src, lines.tokens, lines.computed, lines.pending, lines.drafts,
        lines.page_table, lines.state_slots, *vars(out).values(), rows, tokens, query_len, window,
        lines.tokens.shape[1], lines.drafts.shape[1], columns, page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length", "most_drafts", "vocab", "flush"])
def _advance_kernel(
    row_ids, tokens, drafts, seq_lens, held, history, prompt_len, computed, pending, next_drafts,
    counts, accepted, results, length, most_drafts, vocab, flush,
    PROMPT: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row. A token that is emitted twice is counted by both of its lanes, with one number."""
    s, lane = tl.program_id(0), tl.arange(0, LANES)
    row, live = tl.load(row_ids + s), lane < W
    token = tl.load(tokens + s * W + lane, mask=live, other=0)
    draft = tl.load(drafts + s * (W - 1) + lane, mask=lane < W - 1, other=-1)
    alike = (lane < W - 1) & (draft == token) & (draft >= 0)
    agreed = tl.min(tl.where(alike, W - 1, lane), 0)
    known = tl.load(seq_lens + s) - (W - 1)
    real, old = row > 0, tl.load(held + s).to(tl.int32)
    left = agreed * 0 if PROMPT else tl.where(old < flush, old, 0) + agreed + 1
    tl.store(computed + row, tl.where(real, known + agreed, 0))
    tl.store(pending + row, tl.where(real, left, 0))
    for begin in range(0, most_drafts, LANES):
        column = begin + lane
        tl.store(next_drafts + row * most_drafts + column, -1, mask=column < most_drafts)
    tl.store(accepted + s, agreed)
    results += s * (W + 2)
    tl.store(results + lane, token, mask=live)
    tl.store(results + W, agreed.to(tl.int64))
    tl.store(results + W + 1, tl.sum((draft >= 0).to(tl.int64), 0))
    emits = real & (known + (W - 1) >= tl.load(prompt_len + row))
    where = tl.minimum(known + lane, length - 1)
    tl.store(history + row * length + where, tl.maximum(token, 0), mask=live & emits)
    counted = emits & (lane <= agreed) & (token >= 0)
    alike = (token[:, None] == token[None, :]) & (lane <= agreed)[None, :]
    counts += row * vocab + token
    n = tl.load(counts, mask=counted, other=0) + tl.sum(alike.to(tl.int32), 1)
    tl.store(counts, n, mask=counted)


@advance_rows.backend("triton", supports=gpu_trait)
def advance_rows_triton(
    lines: Lines,
    counts: Tensor,
    row_ids: Tensor,
    tokens: Tensor,
    drafts: Tensor,
    seq_lens: Tensor,
    held: Tensor,
    flush: int,
    prompt: bool,
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.table.advance_rows. tokens and drafts are contiguous."""
    rows, width = tokens.shape
    accepted, results = seq_lens.new_empty(rows), tokens.new_empty(rows, width + 2)
    _advance_kernel[(rows,)](
        row_ids, tokens, drafts, seq_lens, held, lines.tokens, lines.prompt_len, lines.computed,
        lines.pending, lines.drafts, counts, accepted, results, lines.tokens.shape[1],
        lines.drafts.shape[1], counts.shape[1], flush, PROMPT=prompt, W=width,
        LANES=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return accepted, results


@triton.jit(do_not_specialize=["rows", "tokens", "length", "window"])
def _follow_kernel(
    history, row_ids, token_rows, positions, cu_seqlens, accepted, after, last, sample_at,
    rows, tokens, length, window, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens, and as many rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < tokens
    row = tl.load(row_ids + tl.load(token_rows + at, mask=live, other=0))
    where = tl.minimum(tl.load(positions + at, mask=live, other=0) + 1, length - 1)
    tl.store(after + at, tl.load(history + row * length + where), mask=live)
    live = at < rows
    end = tl.load(cu_seqlens + at + 1, mask=live, other=1)
    place = tl.maximum(end - window + tl.load(accepted + at, mask=live, other=0), 0)
    tl.store(last + at, place.to(tl.int64), mask=live)
    tl.store(sample_at + at, tl.load(positions + place, mask=live, other=0) + 2, mask=live)


@follow.backend("triton", supports=gpu_trait)
def follow_triton(
    history: Tensor,
    row_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See lockstep.kernels.table.follow."""
    rows, tokens = row_ids.shape[0], positions.shape[0]
    after, last = torch.empty_like(positions), torch.empty_like(row_ids)
    sample_at = row_ids.new_empty(rows, 1)
    _follow_kernel[(triton.cdiv(max(rows, tokens), ROW_BLOCK),)](
        history, row_ids, token_rows, positions, cu_seqlens, accepted, after, last, sample_at,
        rows, tokens, history.shape[1], window, BLOCK=ROW_BLOCK, num_warps=2,
    )  # fmt: skip
    return after, last, sample_at


@triton.jit(do_not_specialize=["rows", "most_drafts", "index", "columns", "page_size"])
def _draft_step_kernel(
    computed, drafts, row_ids, tokens, page_table, token_ids, positions, slot_mapping, starts,
    seq_lens, cu_seqlens, token_rows, sample_at, rows, most_drafts, index, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows: keep a draft each, and stand on it."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < rows
    row = tl.load(row_ids + at, mask=live, other=0)
    draft = tl.load(tokens + at, mask=live, other=0)
    tl.store(drafts + row * most_drafts + index, draft, mask=live)
    tl.store(token_ids + at, tl.maximum(draft, 0), mask=live)
    start = tl.load(computed + row) + index
    pages = page_table + tl.where(live, at, 0).to(tl.int64) * columns
    tl.store(slot_mapping + at, _slot(pages, start, columns, page_size), mask=live)
    tl.store(positions + at, start.to(tl.int64), mask=live)
    tl.store(sample_at + at, start.to(tl.int64) + 2, mask=live)
    tl.store(starts + at, start, mask=live)
    tl.store(seq_lens + at, start + 1, mask=live)
    tl.store(token_rows + at, at.to(tl.int64), mask=live)
    tl.store(cu_seqlens + at, at, mask=at <= rows)


@draft_step.backend("triton", supports=gpu_trait)
def draft_step_triton(
    computed: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    index: int,
    page_size: int,
) -> DraftTensors:
    """See lockstep.kernels.table.draft_step. tokens and page_table are contiguous."""
    rows = row_ids.shape[0]
    ids, positions, slots, token_rows = (torch.empty_like(row_ids) for _ in range(4))
    starts, seq_lens, cu = (computed.new_empty(n) for n in (rows, rows, rows + 1))
    sample_at = row_ids.new_empty(rows, 1)
    out = DraftTensors(ids, positions, slots, starts, seq_lens, cu, token_rows, sample_at)
    _draft_step_kernel[(rows // ROW_BLOCK + 1,)](
        computed, drafts, row_ids, tokens, page_table, *vars(out).values(), rows,
        drafts.shape[1], index, page_table.shape[1], page_size, BLOCK=ROW_BLOCK, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["length", "stride", "count", "least", "most"])
def _lookup_kernel(
    history, computed, drafts, row_ids, length, stride, count, least, most,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row: the longest n-gram wins, then the latest; both in one number, n above position."""
    row = tl.load(row_ids + tl.program_id(0))
    known = tl.load(computed + row) + 1
    history += row * length
    best = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, known, BLOCK):
        behind = begin + tl.arange(0, BLOCK)
        alike, n = (behind > 0) & (behind < known), tl.zeros((BLOCK,), tl.int32)
        for back in range(1, most + 1):
            inside = alike & (behind >= back)
            token = tl.load(history + behind - back, mask=inside, other=-1)
            alike = inside & (token == tl.load(history + tl.maximum(known - back, 0)))
            n += alike.to(tl.int32)
        found = (n.to(tl.int64) << 32) | behind.to(tl.int64)
        best = tl.maximum(best, tl.where(n >= least, found, 0))
    behind = (tl.max(best, 0) & 0x7FFFFFFF).to(tl.int32)
    lane = tl.arange(0, LANES)
    real = (behind > 0) & (behind + lane < known)
    ahead = tl.load(history + behind + lane, mask=real, other=-1)
    tl.store(drafts + row * stride + lane, ahead, mask=lane < count)


@lookup.backend("triton", supports=gpu_trait)
def lookup_triton(
    history: Tensor,
    computed: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    least: int,
    most: int,
) -> None:
    """See lockstep.kernels.table.lookup."""
    count = drafts.shape[1]
    if count:
        _lookup_kernel[(row_ids.shape[0],)](
            history, computed, drafts, row_ids, history.shape[1], drafts.stride(0), count, least,
            most, BLOCK=HISTORY_BLOCK, LANES=triton.next_power_of_2(count), num_warps=8,
        )  # fmt: skip
