"""Launchers of prepare_step and advance_rows in Triton."""

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.step_metadata import RowTensors, StepTensors, advance_rows, prepare_step
from lockstep.kernels.step_metadata.kernels import advance_rows_kernel, prepare_step_kernel

BLOCK = 256
"""Tokens or page-table columns of a CTA of prepare_step."""


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
    """Launch prepare_step_kernel: see lockstep.kernels.step_metadata.prepare_step."""
    rows = row_ids.shape[0]
    columns = table.page_table.shape[1]
    window = query_len if query_lens is None else 1

    def ints(*shape: int) -> Tensor:
        return table.computed.new_empty(shape)

    def longs(*shape: int) -> Tensor:
        return row_ids.new_empty(shape)

    out = StepTensors(
        starts=ints(rows),
        committed=ints(rows),
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
    width = max(query_len if query_lens is None else tokens, columns)
    prepare_step_kernel[(rows, ceil_div(width, BLOCK))](
        row_ids=row_ids,
        query_lens=query_lens,
        sources=state_src,
        history=table.tokens,
        forced_end=table.forced_end,
        computed=table.computed,
        table_folded=table.folded,
        table_drafts=table.drafts,
        draft_limit=table.draft_limit,
        table_pages=table.page_table,
        table_slots=table.state_slots,
        **vars(out),
        rows=rows,
        tokens=tokens,
        query_len=query_len,
        window=window,
        length=table.tokens.shape[1],
        max_drafts=table.drafts.shape[1],
        columns=columns,
        page_size=page_size,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


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
    forced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch advance_rows_kernel: see step_metadata.advance_rows. tokens, drafts are contiguous."""
    rows, width = tokens.shape
    emitted = torch.empty_like(tokens)
    accepted = seq_lens.new_empty(rows)
    results = tokens.new_empty(rows, width + 4)
    advance_rows_kernel[(rows,)](
        row_ids=row_ids,
        tokens=tokens,
        drafts=drafts,
        seq_lens=seq_lens,
        history=table.tokens,
        prompt_len=table.prompt_len,
        forced_end=table.forced_end,
        computed=table.computed,
        table_folded=table.folded,
        table_drafts=table.drafts,
        counts=counts,
        emitted=emitted,
        accepted=accepted,
        results=results,
        length=table.tokens.shape[1],
        max_drafts=table.drafts.shape[1],
        vocab=counts.shape[1],
        flush=flush,
        state_grid=state_grid,
        PROMPT=prompt,
        FORCED=forced,
        W=width,
        LANES=next_power_of_2(width),
        num_warps=1,
    )
    return emitted, accepted, results
