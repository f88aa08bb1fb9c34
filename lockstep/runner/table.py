"""The table: one device row per request, and the truth for lengths, tokens and drafts.

`prepare` makes a step out of it, `advance` commits a verdict to it. Both are device code without a
host sync, so they belong to the captured step. Row 0 is the null row: it always has nothing
committed, page 0 and slot 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.config import Plan
from lockstep.kernels.sampling import SamplingState
from lockstep.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS
from lockstep.step import Step, StepShape, Verdict, flush_after


@dataclass
class StepInputs:
    """What the host says of a step: fixed buffers, one entry per row of the step.

    row_ids int64, 0 where a row pads the step; query_lens, state_src (0: the row's own slot) and
    snapshot_slots, int32, are read by prompt steps only.
    """

    row_ids: Tensor
    query_lens: Tensor
    state_src: Tensor
    snapshot_slots: Tensor

    @classmethod
    def empty(cls, rows: int, device: str) -> "StepInputs":
        """Buffers for steps of up to `rows` rows: all null."""

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        return cls(zeros(torch.int64), *(zeros(torch.int32) for _ in range(3)))

    def fill(self, **columns: list[int]) -> None:
        """Writes each column's head and zeroes the rest: what is not named is null."""
        for name, buffer in vars(self).items():
            values = columns.get(name, [])
            padded = values + [0] * (buffer.shape[0] - len(values))
            buffer.copy_(torch.tensor(padded, dtype=buffer.dtype), non_blocking=True)


class RowTable:
    """R = max_num_seqs + 1 rows. tokens [R, L] int64: prompt, then generated, then drafts."""

    def __init__(self, plan: Plan, vocab: int) -> None:
        rows, device = plan.max_num_seqs + 1, plan.device
        self.page_size, self.query_len = plan.page_size, plan.query_len
        self.flush = flush_after(device)

        def full(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        self.tokens = full(0, torch.int64, plan.history_len)
        self.prompt_len = full(0, torch.int32)
        self.computed = full(0, torch.int32)
        self.pending = full(0, torch.int32)
        self.drafts = full(-1, torch.int64, max(plan.query_len - 1, 0))
        self.page_table = full(0, torch.int32, plan.row_columns)
        self.state_slots = full(0, torch.int32)
        words = (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self.sampling = SamplingState.empty(rows, vocab, MAX_STOP_IDS + 4, words, device)
        self.inputs = StepInputs.empty(rows, device)

    def row_tensors(self) -> list[Tensor]:
        """What makes a row besides pages and state: moved to the host when it is preempted."""
        own = [self.tokens, self.prompt_len, self.computed, self.pending, self.drafts]
        return own + self.sampling.tensors()

    def prepare(self, shape: StepShape) -> Step:
        """The step that the inputs ask for, at the rows' own lengths."""
        inputs, rows = self.inputs, shape.rows
        row_ids = inputs.row_ids[:rows]
        starts = self.computed[row_ids]
        query_lens = torch.full_like(starts, shape.query_len)
        if shape.prompt:
            query_lens = inputs.query_lens[:rows]
        cu = torch.zeros(rows + 1, dtype=torch.int32, device=starts.device)
        torch.cumsum(query_lens, 0, out=cu[1:])
        index = torch.arange(shape.tokens, device=starts.device)
        token_rows = torch.searchsorted(cu[1:], index.int(), right=True).clamp_max(rows - 1)
        positions = starts[token_rows].long() + index - cu[token_rows]
        pages = self.page_table[row_ids]
        column = (positions // self.page_size).clamp_max(pages.shape[1] - 1)
        page = pages[token_rows, column].long()
        drafts = self.drafts[row_ids, : 0 if shape.prompt else shape.query_len - 1]
        self._show_drafts(row_ids, starts, drafts)
        slots, sources = self.state_slots[row_ids].long(), inputs.state_src[:rows].long()
        return Step(
            shape=shape,
            row_ids=row_ids,
            token_ids=self.tokens[
                row_ids[token_rows], positions.clamp_max(self.tokens.shape[1] - 1)
            ],
            positions=positions,
            token_rows=token_rows,
            cu_seqlens=cu,
            starts=starts,
            seq_lens=starts + query_lens,
            page_table=pages,
            slot_mapping=page * self.page_size + positions % self.page_size,
            state_slots=slots,
            state_src=torch.where(sources > 0, sources, slots),
            snapshot_slots=inputs.snapshot_slots[:rows],
            pending=self.pending[row_ids].long(),
            drafts=drafts,
            logit_rows=(cu[1:].long() - 1).clamp_min(0) if shape.prompt else index,
        )

    def _show_drafts(self, row_ids: Tensor, starts: Tensor, drafts: Tensor) -> None:
        """Writes drafts behind the row's last token, so that a step reads one history."""
        if drafts.shape[1]:
            where = starts[:, None].long() + torch.arange(
                1, drafts.shape[1] + 1, device=starts.device
            )
            self.tokens[row_ids[:, None], where] = drafts.clamp_min(0)

    def advance(self, step: Step, verdict: Verdict) -> None:
        """Commits: a row's tokens up to the first draft that the target would not have emitted.

        A prompt chunk commits all its tokens; it emits a token only where it ends the prompt. Rows
        that emit nothing, and the null row, keep what they have.
        """
        rows = step.row_ids
        real = rows > 0
        length = step.seq_lens - step.starts
        window = verdict.accepted + 1
        if step.shape.prompt:
            committed, pending = length, torch.zeros_like(length)
        else:
            held = torch.where(step.pending < self.flush, step.pending, 0).int()
            committed, pending = window, held + window
        self.computed[rows] = torch.where(real, step.starts + committed, 0)
        self.pending[rows] = torch.where(real, pending, 0)
        emits = (real & (step.seq_lens >= self.prompt_len[rows]))[:, None]
        where = step.positions[step.logit_rows].view_as(verdict.tokens) + 1
        where = where.clamp_max(self.tokens.shape[1] - 1)
        kept = self.tokens[rows[:, None], where]
        self.tokens[rows[:, None], where] = torch.where(emits, verdict.tokens, kept)
        order = torch.arange(verdict.tokens.shape[1], device=rows.device)
        counted = (emits & (order <= verdict.accepted[:, None])).int()
        counts = self.sampling.counts
        flat = (rows[:, None] * counts.shape[1] + verdict.tokens).flatten()
        counts.view(-1).index_add_(0, flat, counted.flatten())
