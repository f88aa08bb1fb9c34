"""Ops of drafters on a CPU by one Numba kernel each, with the bits of the reference."""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.drafting import (
    DraftTensors,
    mtp_inputs,
    next_draft_step,
    ngram_lookup,
    numba_kernels,
)


@mtp_inputs.backend("cpu", supports=numba_trait)
def mtp_inputs_cpu(
    history: Tensor,
    row_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See lockstep.kernels.drafting.mtp_inputs."""
    rows = len(row_ids)
    tokens = len(positions)
    next_tokens = torch.empty(tokens, dtype=torch.int64)
    last = torch.empty(rows, dtype=torch.int64)
    sample_at = torch.empty(rows, 1, dtype=torch.int64)
    numba_kernels.mtp_inputs(
        history.data_ptr(), row_ids.data_ptr(), token_rows.data_ptr(), positions.data_ptr(),
        cu_seqlens.data_ptr(), accepted.data_ptr(), next_tokens.data_ptr(), last.data_ptr(),
        sample_at.data_ptr(), rows, tokens, window, history.shape[1],
    )  # fmt: skip
    return next_tokens, last, sample_at


@next_draft_step.backend("cpu", supports=numba_trait)
def next_draft_step_cpu(
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
    """See lockstep.kernels.drafting.next_draft_step."""
    rows = len(row_ids)
    tokens = tokens.contiguous()
    int_sizes = (rows, rows, rows, rows + 1)
    longs = torch.empty(5 * rows, dtype=torch.int64).split(rows)
    ints = torch.empty(sum(int_sizes), dtype=torch.int32).split(int_sizes)
    numba_kernels.next_draft_step(
        computed.data_ptr(), folded.data_ptr(), drafts.data_ptr(), row_ids.data_ptr(),
        tokens.data_ptr(), page_table.data_ptr(), *(x.data_ptr() for x in (*longs, *ints)),
        rows, drafts.stride(0), page_table.shape[1], index, shift, page_size,
    )  # fmt: skip
    token_ids, positions, slot_mapping, token_rows, sample_at = longs
    starts, folded, seq_lens, cu_seqlens = ints
    return DraftTensors(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        starts=starts,
        folded=folded,
        seq_lens=seq_lens,
        cu_seqlens=cu_seqlens,
        token_rows=token_rows,
        sample_at=sample_at[:, None],
    )


@ngram_lookup.backend("cpu", supports=numba_trait)
def ngram_lookup_cpu(
    history: Tensor,
    computed: Tensor,
    texts: Tensor,
    oldest: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """See lockstep.kernels.drafting.ngram_lookup."""
    numba_kernels.ngram_lookup(
        history.data_ptr(), computed.data_ptr(), texts.data_ptr(), oldest.data_ptr(),
        drafts.data_ptr(), row_ids.data_ptr(), len(row_ids), history.shape[1], len(texts),
        drafts.stride(0), drafts.shape[1], min_n, max_n,
    )  # fmt: skip
