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
        address("history", history, torch.int64, history.numel()),
        address("row_ids", row_ids, torch.int64, rows),
        address("token_rows", token_rows, torch.int64, tokens),
        address("positions", positions, torch.int64, tokens),
        address("cu_seqlens", cu_seqlens, torch.int32, rows + 1),
        address("accepted", accepted, torch.int32, rows),
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
    table_rows, max_drafts = drafts.shape
    drafts_address, stride = address_of_rows("drafts", drafts, torch.int64, table_rows, max_drafts)
    if not 0 <= index < max_drafts:
        raise ValueError(f"index: {index}; allowed are 0 to {max_drafts - 1}")
    columns = page_table.shape[1]
    numba_kernels.next_draft_step(
        address("computed", computed, torch.int32, table_rows),
        address("folded", folded, torch.int32, table_rows), drafts_address,
        address("row_ids", row_ids, torch.int64, rows),
        address("tokens", tokens, torch.int64, rows),
        address("page_table", page_table, torch.int32, rows * columns),
        *(x.data_ptr() for x in (*longs, *ints)),
        rows, stride, columns, index, shift, page_size,
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
    table_rows, length = history.shape
    rows = len(row_ids)
    count = drafts.shape[1]
    drafts_address, stride = address_of_rows("drafts", drafts, torch.int64, table_rows, count)
    numba_kernels.ngram_lookup(
        address("history", history, torch.int64, table_rows * length),
        address("computed", computed, torch.int32, table_rows),
        address("texts", texts, torch.int64, len(texts)),
        address("oldest", oldest, torch.int64, 1), drafts_address,
        address("row_ids", row_ids, torch.int64, rows), rows, length, len(texts), stride, count,
        min_n, max_n,
    )  # fmt: skip
