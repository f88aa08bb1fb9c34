"""prepare_step and advance_rows: integer ops between the row table and a step.

prepare_step reads a step's metadata from the table; advance_rows commits the step's results.
Shapes: R rows of the table (row 0 is the null row), L tokens and P pages per row; S rows and T
tokens of the step, Q its query length. W positions per row get a token: W = Q for generated tokens
with drafts, W = 1 for prompt chunks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.history import next_folded
from lockstep.kernels.registry import op


@dataclass(eq=False)
class RowTensors:
    """Row table, except for sampling parameters. Contiguous, int32 unless noted.

    tokens [R, L] int64: prompt, forced tokens that are not computed yet, generated tokens, then
    drafts. prompt_len [R]. forced_end [R]: position after the row's last forced token, at most
    prompt_len where it has none. computed [R]: tokens in the KV cache. folded [R]: tokens that the
    recurrent state in memory includes. drafts [R, K] int64 (-1: none). draft_limit [R]: maximum
    drafts per step. page_table [R, P]. state_slots [R].
    """

    tokens: Tensor
    prompt_len: Tensor
    forced_end: Tensor
    computed: Tensor
    folded: Tensor
    drafts: Tensor
    draft_limit: Tensor
    page_table: Tensor
    state_slots: Tensor

    def __post_init__(self) -> None:
        # A CPU's kernels get addresses alone. They assume these widths and R rows.
        rows = len(self.tokens)
        for name, x in vars(self).items():
            dtype = torch.int64 if name in ("tokens", "drafts") else torch.int32
            if x.dtype != dtype or len(x) != rows or not x.is_contiguous():
                raise ValueError(
                    f"{name}: allowed are {rows} contiguous rows of {dtype}; the tensor is "
                    f"{list(x.shape)} of {x.dtype} with strides {x.stride()}"
                )


@dataclass
class StepTensors:
    """Metadata of a step: fields of lockstep.step.StepContext, with its shapes and dtypes.

    ends [S] int64: index into T of each row's last token.
    """

    starts: Tensor
    committed: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    state_slots: Tensor
    state_src: Tensor
    folded: Tensor
    page_table: Tensor
    drafts: Tensor
    sample_at: Tensor
    token_rows: Tensor
    positions: Tensor
    token_ids: Tensor
    slot_mapping: Tensor
    ends: Tensor


@op(writes=("table",))
def prepare_step(
    table: RowTensors,
    row_ids: Tensor,
    query_lens: Tensor | None,
    state_src: Tensor,
    tokens: int,
    query_len: int,
    page_size: int,
) -> StepTensors:
    """Read the metadata of a step of T = tokens tokens from the table.

    row_ids [S] int64. query_lens [S] int32: tokens of each prompt chunk; tokens past the last row's
    end (padding) belong to the last row. None: every row has query_len tokens, its last token and
    drafts. Drafts past the row's draft_limit become -1. Drafts are written to table.tokens after
    the last token, 0 for none. state_src [S] int32: slot to resume from; 0 is the row's own slot.

    A row's forced tokens are in table.tokens already. Those after its last token are its drafts of
    this step, whatever its draft_limit is, and it has no other drafts. committed [S]: leading
    tokens of a row that are committed whatever the target emits: in a uniform step its last token
    and the forced ones, at most query_len; all tokens of a prompt chunk.
    """
    uniform = query_lens is None
    window = query_len if uniform else 1
    rows = row_ids.shape[0]
    starts = table.computed[row_ids]
    lengths = torch.full_like(starts, query_len) if query_lens is None else query_lens
    cu = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    index = torch.arange(tokens, dtype=torch.int32, device=starts.device)
    token_rows = torch.searchsorted(cu[1:], index, right=True).clamp_max_(rows - 1)
    positions = (starts - cu[:-1]).long()[token_rows] + index
    seq_lens = starts + lengths
    pages = table.page_table[row_ids]
    column = (positions // page_size).clamp_max_(pages.shape[1] - 1)
    slots = table.state_slots[row_ids].long()
    committed, drafts = step_drafts(table, row_ids, window)
    if not uniform:
        committed = lengths
    _append_drafts(table.tokens, row_ids, starts, drafts)
    # Padding may lie past the table's last column; what it reads there is never used.
    columns = positions.clamp_max(table.tokens.shape[1] - 1)
    decided = torch.arange(1 - window, 1, device=starts.device)
    return StepTensors(
        starts=starts,
        committed=committed,
        seq_lens=seq_lens,
        cu_seqlens=cu,
        state_slots=slots,
        state_src=torch.where(state_src > 0, state_src, slots),
        folded=table.folded[row_ids],
        page_table=pages,
        drafts=drafts,
        sample_at=seq_lens[:, None] + decided,
        token_rows=token_rows,
        positions=positions,
        token_ids=table.tokens[row_ids[token_rows], columns],
        slot_mapping=pages[token_rows, column] * page_size + positions % page_size,
        ends=(cu[1:].long() - 1).clamp_min_(0),
    )


def step_drafts(table: RowTensors, row_ids: Tensor, query_len: int) -> tuple[Tensor, Tensor]:
    """Return committed [S] int32 and drafts [S, query_len - 1] of a uniform step.

    See prepare_step.
    """
    starts = table.computed[row_ids]
    committed = (table.forced_end[row_ids] - starts).clamp(1, query_len)
    order = torch.arange(query_len - 1, device=starts.device)
    limit = torch.where(committed > 1, 0, table.draft_limit[row_ids])
    proposed = table.drafts[row_ids, : query_len - 1]
    drafts = F.pad(proposed, (0, query_len - 1 - proposed.shape[1]), value=-1)
    drafts = torch.where(order < limit[:, None], drafts, -1)
    forced = table.tokens[row_ids[:, None], starts[:, None] + 1 + order]
    return committed, torch.where(order < committed[:, None] - 1, forced, drafts)


def _append_drafts(tokens: Tensor, row_ids: Tensor, starts: Tensor, drafts: Tensor) -> None:
    """Write drafts after the row's last token, so that a step reads all tokens from one tensor."""
    if drafts.shape[1]:
        offsets = torch.arange(1, drafts.shape[1] + 1, device=starts.device)
        tokens[row_ids[:, None], starts[:, None] + offsets] = drafts.clamp_min(0)


@op(writes=("table", "counts"))
def advance_rows(
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
    """Commit a step's results to the table.

    Returns emitted [S, W] int64, accepted [S] int32 and results [S, W+4] int64.

    counts [R, V] int32: generated tokens per row, for penalties. tokens [S, W] int64: tokens of the
    target; -1 for none. drafts [S, W-1] int64. seq_lens [S]: lengths including the step's tokens.
    flush, state_grid: see next_folded. prompt: whether rows were prompt chunks. forced: whether
    the rows had windows of forced tokens, see StepShape.

    emitted: tokens, with the row's forced token where it has one at that position. accepted: number
    of leading drafts that equal their emitted token. results, for the host: emitted, accepted,
    number of drafts, and the first mismatch: the index among the 1 + accepted emitted tokens of a
    forced one that the target would not have emitted (-1: none), with the target's token.

    A prompt chunk commits all of its tokens, and its state includes them; it emits a token only if
    it ends the prompt. A generated step has written the state as next_folded says. A forced step
    has written it at the last multiple of the grid among the tokens that are now computed. The
    first 1 + accepted of its W emitted tokens count as generated. Rows that emit nothing, and the
    null row, keep their tokens. A token of -1 equals no draft, is stored as 0 and is not counted;
    results keep it. The rows' drafts are cleared: a drafter writes new ones after this op.
    """
    width = tokens.shape[1]
    real = row_ids > 0
    first = seq_lens - (width - 1)
    order = torch.arange(width, device=tokens.device)
    columns = (first[:, None] + order).clamp_max_(table.tokens.shape[1] - 1)
    old = table.tokens[row_ids[:, None], columns]
    emits = (real & (seq_lens >= table.prompt_len[row_ids]))[:, None]
    is_forced = emits & (first[:, None] + order < table.forced_end[row_ids][:, None])
    emitted = torch.where(is_forced, old, tokens)
    matches = ((drafts == emitted[:, :-1]) & (drafts >= 0)).int()
    accepted = matches.cumprod(1).sum(1, dtype=torch.int32)
    computed = first + accepted
    folded = computed
    if forced:
        folded = next_folded(computed, table.folded[row_ids], 1, state_grid)
    elif not prompt:
        folded = next_folded(seq_lens - width, table.folded[row_ids], flush, state_grid)
    table.computed[row_ids] = torch.where(real, computed, 0)
    table.folded[row_ids] = torch.where(real, folded, 0)
    table.drafts[row_ids] = -1
    stored = emitted.clamp_min(0)
    table.tokens[row_ids[:, None], columns] = torch.where(emits, stored, old)
    counted = (emits & (order <= accepted[:, None]) & (emitted >= 0)).int()
    flat = (row_ids[:, None] * counts.shape[1] + stored).flatten()
    counts.view(-1).index_add_(0, flat, counted.flatten())
    drafted = (drafts >= 0).sum(1, keepdim=True)
    differs = is_forced & (order <= accepted[:, None]) & (old != tokens)
    index = torch.where(differs, order, width).min(1, keepdim=True).values
    chosen = tokens.gather(1, index.clamp_max(width - 1))
    mismatch = [torch.where(index < width, index, -1), chosen]
    results = torch.cat([emitted, accepted[:, None], drafted, *mismatch], dim=1)
    return emitted, accepted, results
