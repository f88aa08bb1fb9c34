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
from lockstep.kernels.simd.strides import address, address_of_rows


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
        *(address(x, torch.int64) for x in (history, row_ids, token_rows, positions)),
        *(address(x, torch.int32) for x in (cu_seqlens, accepted)),
        *(x.data_ptr() for x in (next_tokens, last, sample_at)),
        rows, tokens, window, history.shape[1],
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
    drafts_address, stride = address_of_rows(drafts, torch.int64)
    numba_kernels.next_draft_step(
        address(computed, torch.int32), address(folded, torch.int32), drafts_address,
        address(row_ids, torch.int64), address(tokens, torch.int64),
        address(page_table, torch.int32), *(x.data_ptr() for x in (*longs, *ints)),
        rows, stride, page_table.shape[1], index, shift, page_size,
    )  # fmt: skip
    token_ids, positions, slot_mapping, token_rows, sample_at = longs
    starts, row_folded, seq_lens, cu_seqlens = ints
    return DraftTensors(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        starts=starts,
        folded=row_folded,
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
    drafts_address, stride = address_of_rows(drafts, torch.int64)
    numba_kernels.ngram_lookup(
        address(history, torch.int64), address(computed, torch.int32),
        address(texts, torch.int64), address(oldest, torch.int64), drafts_address,
        address(row_ids, torch.int64), len(row_ids), history.shape[1], len(texts), stride,
        drafts.shape[1], min_n, max_n,
    )  # fmt: skip
