"""Integer ops of drafters, each one pass over the rows.

mtp_inputs and next_draft_step take a draft module from the verified step to its own steps of one
token per row. block_step does so for a module that fills a block of tokens at once. ngram_lookup
drafts from a row's own history and from other texts, prediction_lookup from a text of each row.
Shapes: R rows of the table (row 0 is the null row), L tokens per row, S rows and T tokens of the
step, K drafts per row, P pages.
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
    """Compute the inputs of a draft module from a committed step.

    history [R, L] int64; the other tensors as in StepContext and Verdict; window: W. Returns
    next_tokens [T] int64: the token after each token of the step; last [S] int64: index into T of
    each row's last committed token; sample_at [S, 1] int64: position of the first draft.
    """
    columns = (positions + 1).clamp_max_(history.shape[1] - 1)
    next_tokens = history[row_ids[token_rows], columns]
    last = (cu_seqlens[1:].long() + (accepted - window)).clamp_min_(0)
    return next_tokens, last, positions[last, None] + 2


@dataclass
class DraftTensors:
    """Step of one token per row: fields of lockstep.step.StepContext, with T = S."""

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
    shift: int,
    page_size: int,
) -> DraftTensors:
    """Store tokens as draft number `index` of the rows, and build the step that reads them.

    tokens [S] int64 (-1: none, read as 0) go to drafts [R, K]. The step's positions are computed
    [R] + index + shift. shift: 1 for a draft model, which reads a draft at the draft's own
    position; 0 for a module that reads it one position earlier. folded [R]: as in StepContext.
    page_table [S, P]. sample_at: position of the draft after these tokens.
    """
    drafts[row_ids, index] = tokens
    starts = computed[row_ids] + index + shift
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
        sample_at=positions[:, None] + 2 - shift,
    )


@dataclass
class BlockTensors:
    """Step of S blocks with T tokens in total: fields of lockstep.step.StepContext.

    starts, seq_lens and cu_seqlens describe one token per block, its last.
    """

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
    """Build the step of one block of `width` tokens per row: its last token, then mask tokens.

    The last known token is history [R, L] at computed [R]. mask: the mask token's id. page_table
    [S, P]. Each token has its own position but attends as the block's last token does, so that it
    sees the whole block. sample_at [S, width - 1] int64: positions of the drafts.
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
    min_n: int,
    max_n: int,
) -> None:
    """Draft the tokens that followed an earlier occurrence of the row's last n-gram.

    The longest n-gram with min_n <= n <= max_n at the end of the computed + 1 known tokens of
    history [R, L] is looked up (Saxena, prompt lookup decoding, 2023). min_n 0 counts as 1. drafts
    [R, K] int64 of the rows [S] are written, -1 where there is no token; drafts may be columns of a
    wider tensor.

    texts [N] int64: circular buffer of other texts, each terminated by -1. Its oldest token is at
    oldest [1] int64. N may be 0. Among matches of one length the row's own history is preferred to
    texts, and later matches to earlier ones. The null row is not looked up in texts.
    """
    count = drafts.shape[1]
    ordered_texts = texts.roll(-int(oldest))
    for row in row_ids.tolist():
        known = history[row, : int(computed[row]) + 1]
        text = torch.cat([ordered_texts, known]) if row else known
        index = _find_match_end(text, min(max_n, len(known)), min_n)
        continuation = text[index : index + count] if index else text[:0]
        ends = (continuation < 0).nonzero().flatten()
        continuation = continuation[: int(ends[0])] if len(ends) else continuation
        drafts[row] = -1
        drafts[row, : len(continuation)] = continuation


def _find_match_end(text: Tensor, max_n: int, min_n: int) -> int:
    """Return the index after the best earlier occurrence of the n-gram that ends text [N], or 0.

    The best occurrence has the longest n-gram; of equal ones the latest counts.
    """
    match_end = 0
    ends = torch.arange(1, len(text), device=text.device)
    for n in range(1, max_n + 1):
        ends = ends[ends >= n]
        ends = ends[text[ends - n] == text[-n]]
        if not len(ends):
            break
        if n >= min_n:
            match_end = int(ends[-1])
    return match_end


@op(writes=("drafts",))
def prediction_lookup(
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
    """Draft the tokens that follow the answer's last n-gram in the row's predicted text.

    The answer is history [R, L] from prompt_len [R] to computed [R], inclusive. The longest n-gram
    with n <= max_n at its end is looked up in texts [R, P] int64, of text_lens [R] int32 tokens;
    n >= min_n, or the whole answer while it is shorter. Among matches of one length the one nearest
    to the answer's length counts, and of two equally near ones the later. So drafts begin at the
    text's beginning. drafts [R, K] int64 of the rows [S] are written, -1 where there is no token;
    drafts may be columns of a wider tensor.
    """
    count = drafts.shape[1]
    for row in row_ids.tolist():
        answer = history[row, int(prompt_len[row]) : int(computed[row]) + 1]
        text = texts[row, : int(text_lens[row])]
        index = _find_nearest_match_end(text, answer, min_n, max_n)
        continuation = text[index : index + count] if index else text[:0]
        drafts[row] = -1
        drafts[row, : len(continuation)] = continuation


def _find_nearest_match_end(text: Tensor, answer: Tensor, min_n: int, max_n: int) -> int:
    """Return the index in text [N] after the best occurrence of an n-gram that ends answer [M], or
    0: see prediction_lookup.
    """
    length = len(answer)
    match_ends: list[int] = []
    ends = torch.arange(1, max(len(text), 1), device=text.device)
    for n in range(1, min(max_n, length) + 1):
        ends = ends[ends >= n]
        ends = ends[text[ends - n] == answer[-n]]
        if not len(ends):
            break
        if n >= min(min_n, length):
            match_ends = ends.tolist()
    return max(match_ends, key=lambda end: (-abs(end - length), end), default=0)
