"""prepare_step and advance_rows on a CPU by one Numba kernel each, with the bits of the reference.

A step's metadata are views of two tensors, since an allocation takes as long as five views.
"""

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.simd.strides import address, optional_address
from lockstep.kernels.step_metadata import (
    RowTensors,
    StepTensors,
    advance_rows,
    numba_kernels,
    prepare_step,
)


@prepare_step.backend("cpu", supports=numba_trait)
def prepare_step_cpu(
    table: RowTensors,
    row_ids: Tensor,
    query_lens: Tensor | None,
    state_src: Tensor,
    tokens: int,
    query_len: int,
    page_size: int,
) -> StepTensors:
    """See lockstep.kernels.step_metadata.prepare_step."""
    rows = len(row_ids)
    columns = table.page_table.shape[1]
    window = query_len if query_lens is None else 1
    int_sizes = (rows, rows, rows, rows + 1, rows, rows * columns)
    long_sizes = (rows, rows, rows, rows * (window - 1), rows * window, *[tokens] * 4)
    ints = torch.empty(sum(int_sizes), dtype=torch.int32).split(int_sizes)
    longs = torch.empty(sum(long_sizes), dtype=torch.int64).split(long_sizes)
    starts, committed, seq_lens, cu_seqlens, folded, page_table = ints
    slots, sources, ends, drafts, sample_at, token_rows, positions, token_ids, slot_mapping = longs
    numba_kernels.prepare_step(
        table.tokens.data_ptr(), table.forced_end.data_ptr(), table.computed.data_ptr(),
        table.folded.data_ptr(), table.drafts.data_ptr(), table.draft_limit.data_ptr(),
        table.page_table.data_ptr(), table.state_slots.data_ptr(),
        address("row_ids", row_ids, torch.int64, rows),
        optional_address("query_lens", query_lens, torch.int32, rows),
        address("state_src", state_src, torch.int32, rows),
        *(x.data_ptr() for x in ints), *(x.data_ptr() for x in longs),
        rows, tokens, query_len, page_size, table.tokens.shape[1], table.drafts.shape[1], columns,
    )  # fmt: skip
    return StepTensors(
        starts=starts,
        committed=committed,
        seq_lens=seq_lens,
        cu_seqlens=cu_seqlens,
        state_slots=slots,
        state_src=sources,
        folded=folded,
        page_table=page_table.view(rows, columns),
        drafts=drafts.view(rows, window - 1),
        sample_at=sample_at.view(rows, window),
        token_rows=token_rows,
        positions=positions,
        token_ids=token_ids,
        slot_mapping=slot_mapping,
        ends=ends,
    )


@advance_rows.backend("cpu", supports=numba_trait)
def advance_rows_cpu(
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
    """See lockstep.kernels.step_metadata.advance_rows."""
    rows, width = tokens.shape
    tokens = tokens.contiguous()
    drafts = drafts.contiguous()
    emitted = torch.empty(rows, width, dtype=torch.int64)
    accepted = torch.empty(rows, dtype=torch.int32)
    results = torch.empty(rows, width + 4, dtype=torch.int64)
    numba_kernels.advance_rows(
        table.tokens.data_ptr(), table.prompt_len.data_ptr(), table.forced_end.data_ptr(),
        table.computed.data_ptr(), table.folded.data_ptr(), table.drafts.data_ptr(),
        address("counts", counts, torch.int32, len(table.tokens) * counts.shape[1]),
        address("row_ids", row_ids, torch.int64, rows),
        address("tokens", tokens, torch.int64, rows * width),
        address("drafts", drafts, torch.int64, rows * (width - 1)),
        address("seq_lens", seq_lens, torch.int32, rows),
        *(x.data_ptr() for x in (emitted, accepted, results)),
        rows, width, table.tokens.shape[1], table.drafts.shape[1], counts.shape[1], flush,
        state_grid, int(prompt), int(forced),
    )  # fmt: skip
    return emitted, accepted, results
