"""What leads drafters through a step and its rows: integers only, one pass over the rows each.

mtp_inputs and next_draft_step lead a draft module from the step that was verified to its own steps
of one token a row, and block_step one that fills a block of each row at once; ngram_lookup drafts
from a row's own history and other texts. R rows of the table (row 0 is the null row), L tokens of a
row, S rows and T tokens of the step, K drafts of a row, P pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.registry import op


@op
def mtp_inputs(
    history: Tensor,
    row_ids: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A step that is committed, as a draft module reads it: history [R, L] int64, the rest as in
    Step and Verdict; W = window -> after [T] int64: the token behind each of the step's; last [S]
    int64: index into T of each row's last committed position; sample_at [S, 1] int64: where the
    draft made there will stand.
    """
    where = (positions + 1).clamp_max_(history.shape[1] - 1)
    after = history[row_ids[token_rows], where]
    last = (cu_seqlens[1:].long() + (accepted - window)).clamp_min_(0)
    return after, last, positions[last, None] + 2


@dataclass
class DraftTensors:
    """A step of one token per row, S tokens: fields of lockstep.step.StepContext."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    starts: Tensor
    folded: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    token_rows: Tensor
    sample_at: Tensor


@op(writes=("drafts",))
def next_draft_step(
    computed: Tensor,
    folded: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    tokens: Tensor,
    page_table: Tensor,
    index: int,
    behind: int,
    page_size: int,
) -> DraftTensors:
    """Keeps tokens [S] int64 (-1: none) as the rows' draft number `index` in drafts [R, K], and
    makes the step that reads them, 0 for none: its position lies index + behind places behind
    computed [R]; folded [R]: as in Step; page_table [S, P]. sample_at: where the draft after them
    will stand.
    """
    drafts[row_ids, index] = tokens
    starts = computed[row_ids] + index + behind
    positions = starts.long()
    column = (positions // page_size).clamp_max_(page_table.shape[1] - 1)
    page = page_table.gather(1, column[:, None])[:, 0]
    rows = torch.arange(row_ids.shape[0] + 1, device=starts.device)
    return DraftTensors(
        token_ids=tokens.clamp_min(0),
        positions=positions,
        slot_mapping=page * page_size + positions % page_size,
        starts=starts,
        folded=folded[row_ids],
        seq_lens=starts + 1,
        cu_seqlens=rows.int(),
        token_rows=rows[:-1],
        sample_at=positions[:, None] + 2 - behind,
    )


@dataclass
class BlockTensors:
    """A step of S blocks of T tokens in all: fields of lockstep.step.StepContext. starts, seq_lens
    and cu_seqlens are those of one token a block, its last."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    starts: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    token_rows: Tensor
    sample_at: Tensor


@op
def block_step(
    computed: Tensor,
    history: Tensor,
    row_ids: Tensor,
    page_table: Tensor,
    width: int,
    mask: int,
    page_size: int,
) -> BlockTensors:
    """The step of one block of `width` tokens per row: its last known token, which history [R, L]
    has at computed [R], and token `mask` at each place behind it; page_table [S, P].

    A token stands at its own position, and attends from the block's last one, so that it sees the
    whole block. sample_at [S, width - 1] int64: where the drafts of the masked places will stand.
    """
    rows = row_ids.shape[0]
    first = computed[row_ids]
    order = torch.arange(width, dtype=torch.int32, device=first.device)
    positions = (first[:, None] + order).long()
    column = (positions // page_size).clamp_max_(page_table.shape[1] - 1)
    known = history[row_ids, first.long()]
    tokens = torch.full_like(positions, mask)
    tokens[:, 0] = known
    starts = first + (width - 1)
    index = torch.arange(rows + 1, device=first.device)
    return BlockTensors(
        token_ids=tokens.flatten(),
        positions=positions.flatten(),
        slot_mapping=(page_table.gather(1, column) * page_size + positions % page_size).flatten(),
        starts=starts,
        seq_lens=starts + 1,
        cu_seqlens=index.int(),
        token_rows=index[:-1].repeat_interleave(width),
        sample_at=positions[:, 1:].contiguous(),
    )


@op(writes=("drafts",))
def ngram_lookup(
    history: Tensor,
    computed: Tensor,
    texts: Tensor,
    oldest: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    least: int,
    most: int,
) -> None:
    """Writes drafts [R, K] int64 of the rows [S]: the tokens behind an earlier occurrence of the
    longest n-gram, least <= n <= most, that ends the computed + 1 known ones of history [R, L]; -1
    where there are none (Saxena, prompt lookup decoding, 2023). drafts may be the first columns of
    wider lines.

    texts [N] int64: a ring of other texts, each with -1 behind it, which begins with its oldest
    token at oldest [1] int64; N may be 0. Of occurrences of one length the row's own come before
    those in the ring, and later ones before earlier ones. The null row is
    not looked up in the ring.
    """
    count = drafts.shape[1]
    others = texts.roll(-int(oldest))
    for row in row_ids.tolist():
        own = history[row, : int(computed[row]) + 1]
        text = torch.cat([others, own]) if row else own
        place = _behind_match(text, min(most, len(own)), least)
        ahead = text[place : place + count] if place else text[:0]
        ends = (ahead < 0).nonzero().flatten()
        ahead = ahead[: int(ends[0])] if len(ends) else ahead
        drafts[row] = -1
        drafts[row, : len(ahead)] = ahead


def _behind_match(text: Tensor, most: int, least: int) -> int:
    """The place behind the latest earlier occurrence of the longest n-gram that ends the text, or
    0. text: [N] int64."""
    found = 0
    behind = torch.arange(1, len(text), device=text.device)
    for n in range(1, most + 1):
        behind = behind[behind >= n]
        behind = behind[text[behind - n] == text[-n]]
        if not len(behind):
            break
        if n >= least:
            found = int(behind[-1])
    return found
