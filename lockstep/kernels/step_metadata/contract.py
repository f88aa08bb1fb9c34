"""What stands between the table and a step: integers only, one pass over the rows each.

prepare_step reads a step out of the table, advance_rows commits a verdict to it. R rows of the
table (row 0 is the null row), L tokens and P pages of a row, S rows and T tokens of the step, Q its
query length, W positions per row whose token is decided: W = Q where rows bring drafts, 1 where
they bring a chunk of a prompt.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.history import next_folded
from lockstep.kernels.registry import op


@dataclass(eq=False)
class RowTensors:
    """The table, but for sampling. tokens [R, L] int64: prompt, then generated, then drafts;
    drafts [R, K] int64 (-1: none); page_table [R, P]; prompt_len, computed, folded (tokens that the
    row's state in memory holds), draft_limit (the most of its drafts that a step brings),
    state_slots [R]; int32 unless noted. Contiguous.
    """

    tokens: Tensor
    prompt_len: Tensor
    computed: Tensor
    folded: Tensor
    drafts: Tensor
    draft_limit: Tensor
    page_table: Tensor
    state_slots: Tensor


@dataclass
class StepTensors:
    """What the table says of a step: fields of lockstep.step.StepContext, of its shapes and dtypes.

    ends [S] int64: index into T of each row's last token.
    """

    starts: Tensor
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
    """row_ids [S] int64; query_lens, state_src [S] int32 (0: the row's own slot); T = tokens.

    query_lens None: every row brings query_len tokens, its last one and drafts, which are written
    behind it in table.tokens (0 for none); those past the row's limit are none. Else chunks of
    prompts, no drafts; tokens past the last row's end count to it.
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
    drafts = _limited(table.drafts[row_ids, : window - 1], table.draft_limit[row_ids])
    _show_drafts(table.tokens, row_ids, starts, drafts)
    where = positions.clamp_max(table.tokens.shape[1] - 1)
    decided = torch.arange(1 - window, 1, device=starts.device)
    return StepTensors(
        starts=starts,
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
        token_ids=table.tokens[row_ids[token_rows], where],
        slot_mapping=pages[token_rows, column] * page_size + positions % page_size,
        ends=(cu[1:].long() - 1).clamp_min_(0),
    )


def _limited(drafts: Tensor, limit: Tensor) -> Tensor:
    """The drafts [S, W-1], but for those past each row's limit [S]: they become -1."""
    order = torch.arange(drafts.shape[1], device=drafts.device)
    return torch.where(order < limit[:, None], drafts, -1)


def _show_drafts(tokens: Tensor, row_ids: Tensor, starts: Tensor, drafts: Tensor) -> None:
    """Writes drafts behind the row's last token, so that a step reads one history."""
    if drafts.shape[1]:
        behind = torch.arange(1, drafts.shape[1] + 1, device=starts.device)
        tokens[row_ids[:, None], starts[:, None] + behind] = drafts.clamp_min(0)


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
) -> tuple[Tensor, Tensor]:
    """Commits a row's tokens up to the first draft that is not the target's own token there.

    tokens [S, W] int64: the target's, -1 where it has none; drafts [S, W-1] int64; seq_lens [S]
    int32; counts [R, V] int32 of generated tokens; flush, state_grid: of the rows' recurrent state
    -> accepted [S] int32: leading drafts that equal their token; results [S, W+2] int64 for the
    host: the tokens, accepted, drafted.

    A prompt chunk commits all its tokens, and its state holds them; it emits only where it ends the
    prompt. A generated step wrote the state as next_folded says. Of the W tokens, written behind
    what was committed, the first 1 + accepted count as generated. Rows that emit nothing, and the
    null row, keep their tokens.
    A token of -1 equals no draft, stands in the row as 0, and is not counted; the results keep it.
    No row of the step keeps a draft: what its drafter does not write from here on is none.
    """
    agreed = ((drafts == tokens[:, :-1]) & (drafts >= 0)).int()
    accepted = agreed.cumprod(1).sum(1, dtype=torch.int32)
    width = tokens.shape[1]
    real = row_ids > 0
    known = seq_lens - (width - 1) + accepted
    folded = known
    if not prompt:
        folded = next_folded(seq_lens - width, table.folded[row_ids], flush, state_grid)
    table.computed[row_ids] = torch.where(real, known, 0)
    table.folded[row_ids] = torch.where(real, folded, 0)
    table.drafts[row_ids] = -1
    emits = (real & (seq_lens >= table.prompt_len[row_ids]))[:, None]
    order = torch.arange(width, device=tokens.device)
    where = (seq_lens[:, None] - (width - 1) + order).clamp_max_(table.tokens.shape[1] - 1)
    kept = table.tokens[row_ids[:, None], where]
    shown = tokens.clamp_min(0)
    table.tokens[row_ids[:, None], where] = torch.where(emits, shown, kept)
    counted = (emits & (order <= accepted[:, None]) & (tokens >= 0)).int()
    flat = (row_ids[:, None] * counts.shape[1] + shown).flatten()
    counts.view(-1).index_add_(0, flat, counted.flatten())
    drafted = (drafts >= 0).sum(1, keepdim=True)
    return accepted, torch.cat([tokens, accepted[:, None], drafted], dim=1)
