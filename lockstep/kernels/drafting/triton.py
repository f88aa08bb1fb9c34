"""Launchers of the drafters' ops in Triton."""

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.drafting import (
    BlockTensors,
    DraftTensors,
    block_step,
    mtp_inputs,
    next_draft_step,
    ngram_lookup,
    prediction_lookup,
)
from lockstep.kernels.drafting.kernels import (
    block_step_kernel,
    follow_kernel,
    match_kernel,
    mtp_inputs_kernel,
    next_draft_step_kernel,
    predicted_follow_kernel,
    predicted_match_kernel,
)
from lockstep.kernels.integers import ceil_div, next_power_of_2

ROW_BLOCK = 64
"""Rows or tokens of a CTA."""
HISTORY_BLOCK = 2048
"""Positions of a row's history, or of texts, that one CTA searches."""


@mtp_inputs.backend("triton", supports=gpu_trait)
def mtp_inputs_triton(
    history: Tensor,
    row_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch mtp_inputs_kernel: see lockstep.kernels.drafting.mtp_inputs."""
    rows = row_ids.shape[0]
    tokens = positions.shape[0]
    next_tokens = torch.empty_like(positions)
    last = torch.empty_like(row_ids)
    sample_at = row_ids.new_empty(rows, 1)
    mtp_inputs_kernel[(ceil_div(max(rows, tokens), ROW_BLOCK),)](
        history=history,
        row_ids=row_ids,
        token_rows=token_rows,
        positions=positions,
        cu_seqlens=cu_seqlens,
        accepted=accepted,
        next_tokens=next_tokens,
        last=last,
        sample_at=sample_at,
        rows=rows,
        tokens=tokens,
        length=history.shape[1],
        window=window,
        BLOCK=ROW_BLOCK,
        num_warps=2,
    )
    return next_tokens, last, sample_at


@next_draft_step.backend("triton", supports=gpu_trait)
def next_draft_step_triton(
    computed: Tensor,
    folded: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    index: int,
    shift: int,
    page_size: int,
) -> DraftTensors:
    """Launch next_draft_step_kernel: see its contract. tokens and page_table are contiguous."""
    rows = row_ids.shape[0]
    out = DraftTensors(
        token_ids=torch.empty_like(row_ids),
        positions=torch.empty_like(row_ids),
        slot_mapping=torch.empty_like(row_ids),
        starts=computed.new_empty(rows),
        folded=computed.new_empty(rows),
        seq_lens=computed.new_empty(rows),
        cu_seqlens=computed.new_empty(rows + 1),
        token_rows=torch.empty_like(row_ids),
        sample_at=row_ids.new_empty(rows, 1),
    )
    next_draft_step_kernel[(rows // ROW_BLOCK + 1,)](
        computed=computed,
        table_folded=folded,
        drafts=drafts,
        row_ids=row_ids,
        tokens=tokens,
        page_table=page_table,
        token_ids=out.token_ids,
        positions=out.positions,
        slot_mapping=out.slot_mapping,
        starts=out.starts,
        folded=out.folded,
        seq_lens=out.seq_lens,
        cu_seqlens=out.cu_seqlens,
        token_rows=out.token_rows,
        sample_at=out.sample_at,
        rows=rows,
        max_drafts=drafts.shape[1],
        index=index,
        shift=shift,
        columns=page_table.shape[1],
        page_size=page_size,
        BLOCK=ROW_BLOCK,
        num_warps=2,
    )
    return out


@block_step.backend("triton", supports=gpu_trait)
def block_step_triton(
    computed: Tensor,
    history: Tensor,
    row_ids: Tensor,
    page_table: Tensor,
    width: int,
    mask: int,
    page_size: int,
) -> BlockTensors:
    """Launch block_step_kernel: see its contract. page_table is contiguous."""
    rows = row_ids.shape[0]
    tokens = rows * width
    out = BlockTensors(
        token_ids=row_ids.new_empty(tokens),
        positions=row_ids.new_empty(tokens),
        slot_mapping=row_ids.new_empty(tokens),
        starts=computed.new_empty(rows),
        seq_lens=computed.new_empty(rows),
        cu_seqlens=computed.new_empty(rows + 1),
        token_rows=row_ids.new_empty(tokens),
        sample_at=row_ids.new_empty(rows, width - 1),
    )
    block_step_kernel[(tokens // ROW_BLOCK + 1,)](
        computed=computed,
        history=history,
        row_ids=row_ids,
        page_table=page_table,
        **vars(out),
        rows=rows,
        length=history.shape[1],
        width=width,
        mask_token=mask,
        columns=page_table.shape[1],
        page_size=page_size,
        BLOCK=ROW_BLOCK,
        num_warps=2,
    )
    return out


@ngram_lookup.backend("triton", supports=gpu_trait)
def ngram_lookup_triton(
    history: Tensor,
    computed: Tensor,
    texts: Tensor,
    oldest: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """Launch match_kernel and follow_kernel: see lockstep.kernels.drafting.ngram_lookup."""
    count = drafts.shape[1]
    if not count:
        return
    rows = row_ids.shape[0]
    length = history.shape[1]
    num_texts = texts.shape[0]
    blocks = ceil_div(length, HISTORY_BLOCK) + ceil_div(num_texts, HISTORY_BLOCK)
    matches = row_ids.new_empty(rows, blocks)
    match_kernel[(rows, blocks)](
        history=history,
        computed=computed,
        texts=texts,
        oldest=oldest,
        row_ids=row_ids,
        matches=matches,
        length=length,
        num_texts=num_texts,
        min_n=min_n,
        max_n=max_n,
        BLOCK=HISTORY_BLOCK,
        num_warps=8,
    )
    follow_kernel[(rows,)](
        history=history,
        computed=computed,
        texts=texts,
        oldest=oldest,
        drafts=drafts,
        row_ids=row_ids,
        matches=matches,
        length=length,
        num_texts=num_texts,
        stride=drafts.stride(0),
        count=count,
        blocks=blocks,
        BLOCKS=next_power_of_2(blocks),
        LANES=next_power_of_2(count),
        num_warps=1,
    )


@prediction_lookup.backend("triton", supports=gpu_trait)
def prediction_lookup_triton(
    history: Tensor,
    computed: Tensor,
    prompt_len: Tensor,
    texts: Tensor,
    text_lens: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """Launch predicted_match_kernel and predicted_follow_kernel: see prediction_lookup."""
    count = drafts.shape[1]
    if not count:
        return
    rows = row_ids.shape[0]
    width = texts.shape[1]
    blocks = ceil_div(width, HISTORY_BLOCK)
    matches = row_ids.new_empty(rows, blocks)
    predicted_match_kernel[(rows, blocks)](
        history=history,
        computed=computed,
        prompt_len=prompt_len,
        texts=texts,
        text_lens=text_lens,
        row_ids=row_ids,
        matches=matches,
        length=history.shape[1],
        width=width,
        min_n=min_n,
        max_n=max_n,
        BLOCK=HISTORY_BLOCK,
        num_warps=8,
    )
    predicted_follow_kernel[(rows,)](
        computed=computed,
        prompt_len=prompt_len,
        texts=texts,
        text_lens=text_lens,
        drafts=drafts,
        row_ids=row_ids,
        matches=matches,
        width=width,
        stride=drafts.stride(0),
        count=count,
        blocks=blocks,
        BLOCKS=next_power_of_2(blocks),
        LANES=next_power_of_2(count),
        num_warps=1,
    )
