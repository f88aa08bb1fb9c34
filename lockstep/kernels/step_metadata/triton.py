"""A step's metadata in Triton: one launch an op, a program per row or per block of tokens.

A row of the table belongs to one program, but for row 0, where all that programs write is the same.
Nothing is added atomically and no argument but a window's width is specialised.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.recurrent._rings_triton import folded_by
from lockstep.kernels.step_metadata import RowTensors, StepTensors, advance_rows, prepare_step

BLOCK = 256
"""Tokens or page columns of a program of prepare_step."""


@triton.jit
def _row_bounds(query_lens, query_len, s, BLOCK: tl.constexpr):
    """First token in the step, and tokens, of row s."""
    first = s * query_len
    length = query_len
    if query_lens is not None:
        lengths = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, s, BLOCK):
            before = begin + tl.arange(0, BLOCK)
            lengths += tl.load(query_lens + before, mask=before < s, other=0)
        first = tl.sum(lengths, 0)
        length = tl.load(query_lens + s)
    return first, length


@triton.jit
def slot_at(pages, position, columns, page_size):
    """The slot of each position under a row of a page table."""
    column = tl.minimum(position // page_size, columns - 1)
    return tl.load(pages + column).to(tl.int64) * page_size + position % page_size


@triton.jit(
    do_not_specialize=[
        "rows", "tokens", "query_len", "window", "length", "most_drafts", "columns", "page_size",
    ]
)  # fmt: skip
def _prepare_kernel(
    row_ids, query_lens, sources, history, computed, held, kept, limits, tables, row_slots,
    starts, seq_lens, cu_seqlens, state_slots, state_src, folded, page_table, drafts, sample_at,
    token_rows, positions, token_ids, slot_mapping, ends,
    rows, tokens, query_len, window, length, most_drafts, columns, page_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens and BLOCK page columns of one row; its numbers, by its first program."""
    s = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ids + s)
    start = tl.load(computed + row)
    first, count = _row_bounds(query_lens, query_len, s, BLOCK)
    history = history + row * length
    kept = kept + row * most_drafts
    tables = tables + row * columns
    live = lane < tl.where(s == rows - 1, tokens - first, count)
    position = start + lane
    drafted = live & (lane > 0) & (lane < window)
    wanted = drafted & (lane <= tl.load(limits + row))
    draft = tl.load(kept + lane - 1, mask=wanted, other=-1)
    token = tl.load(history + tl.minimum(position, length - 1), mask=live & ~drafted, other=0)
    slot = slot_at(tables, tl.where(live, position, 0), columns, page_size)
    tl.store(history + position, tl.maximum(draft, 0), mask=drafted)
    tl.store(drafts + s * (window - 1) + lane - 1, draft, mask=drafted)
    tl.store(token_ids + first + lane, tl.where(drafted, tl.maximum(draft, 0), token), mask=live)
    tl.store(positions + first + lane, position.to(tl.int64), mask=live)
    tl.store(token_rows + first + lane, tl.zeros_like(slot) + s, mask=live)
    tl.store(slot_mapping + first + lane, slot, mask=live)
    known = start + count
    tl.store(sample_at + s * window + lane, (known - window + 1 + lane).to(tl.int64), lane < window)
    page = tl.load(tables + lane, mask=lane < columns, other=0)
    tl.store(page_table + s.to(tl.int64) * columns + lane, page, mask=lane < columns)
    if tl.program_id(1) == 0:
        own = tl.load(row_slots + row)
        source = tl.load(sources + s)
        tl.store(starts + s, start)
        tl.store(seq_lens + s, known)
        tl.store(cu_seqlens + s + 1, first + count)
        tl.store(state_slots + s, own.to(tl.int64))
        tl.store(state_src + s, tl.where(source > 0, source, own).to(tl.int64))
        tl.store(folded + s, tl.load(held + row))
        tl.store(ends + s, tl.maximum(first + count - 1, 0).to(tl.int64))
        if s == 0:
            tl.store(cu_seqlens, 0)


@prepare_step.backend("triton", supports=gpu_trait)
def prepare_step_triton(
    table: RowTensors,
    row_ids: Tensor,
    query_lens: Tensor | None,
    state_src: Tensor,
    tokens: int,
    query_len: int,
    page_size: int,
) -> StepTensors:
    """See lockstep.kernels.step_metadata.prepare_step."""
    rows = row_ids.shape[0]
    columns = table.page_table.shape[1]
    window = query_len if query_lens is None else 1

    def ints(*shape: int) -> Tensor:
        return table.computed.new_empty(shape)

    def longs(*shape: int) -> Tensor:
        return row_ids.new_empty(shape)

    out = StepTensors(
        starts=ints(rows),
        seq_lens=ints(rows),
        cu_seqlens=ints(rows + 1),
        state_slots=longs(rows),
        state_src=longs(rows),
        folded=ints(rows),
        page_table=ints(rows, columns),
        drafts=longs(rows, window - 1),
        sample_at=longs(rows, window),
        token_rows=longs(tokens),
        positions=longs(tokens),
        token_ids=longs(tokens),
        slot_mapping=longs(tokens),
        ends=longs(rows),
    )
    widest = max(query_len if query_lens is None else tokens, columns)
    _prepare_kernel[(rows, triton.cdiv(widest, BLOCK))](
        row_ids=row_ids,
        query_lens=query_lens,
        sources=state_src,
        history=table.tokens,
        computed=table.computed,
        held=table.folded,
        kept=table.drafts,
        limits=table.draft_limit,
        tables=table.page_table,
        row_slots=table.state_slots,
        **vars(out),
        rows=rows,
        tokens=tokens,
        query_len=query_len,
        window=window,
        length=table.tokens.shape[1],
        most_drafts=table.drafts.shape[1],
        columns=columns,
        page_size=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["length", "most_drafts", "vocab", "flush", "state_grid"])
def _advance_kernel(
    row_ids, tokens, drafts, seq_lens, history, prompt_len, computed, folded, next_drafts, counts,
    accepted, results, length, most_drafts, vocab, flush, state_grid,
    PROMPT: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row. A token that is emitted twice is counted by both of its lanes, with one number."""
    s = tl.program_id(0)
    lane = tl.arange(0, LANES)
    row = tl.load(row_ids + s)
    live = lane < W
    token = tl.load(tokens + s * W + lane, mask=live, other=0)
    draft = tl.load(drafts + s * (W - 1) + lane, mask=lane < W - 1, other=-1)
    alike = (lane < W - 1) & (draft == token) & (draft >= 0)
    agreed = tl.min(tl.where(alike, W - 1, lane), 0)
    known = tl.load(seq_lens + s) - (W - 1)
    real = row > 0
    held = known + agreed
    if not PROMPT:
        held = folded_by(known - 1, tl.load(folded + row), flush, state_grid)
    tl.store(computed + row, tl.where(real, known + agreed, 0))
    tl.store(folded + row, tl.where(real, held, 0))
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
    table: RowTensors,
    counts: Tensor,
    row_ids: Tensor,
    tokens: Tensor,
    drafts: Tensor,
    seq_lens: Tensor,
    flush: int,
    state_grid: int,
    prompt: bool,
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.step_metadata.advance_rows. tokens and drafts are contiguous."""
    rows, width = tokens.shape
    accepted = seq_lens.new_empty(rows)
    results = tokens.new_empty(rows, width + 2)
    _advance_kernel[(rows,)](
        row_ids=row_ids,
        tokens=tokens,
        drafts=drafts,
        seq_lens=seq_lens,
        history=table.tokens,
        prompt_len=table.prompt_len,
        computed=table.computed,
        folded=table.folded,
        next_drafts=table.drafts,
        counts=counts,
        accepted=accepted,
        results=results,
        length=table.tokens.shape[1],
        most_drafts=table.drafts.shape[1],
        vocab=counts.shape[1],
        flush=flush,
        state_grid=state_grid,
        PROMPT=prompt,
        W=width,
        LANES=triton.next_power_of_2(width),
        num_warps=1,
    )
    return accepted, results
