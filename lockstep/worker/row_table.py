"""The table: one device row per request, and the truth for lengths, tokens and drafts.

`prepare` makes a step out of it, `accept_and_commit` commits the target's tokens to it. Each is one
op without a host sync, so they belong to the captured step. Row 0 is the null row: it always has
nothing committed, page 0 and state slot 0.
"""

import torch
from torch import Tensor

from lockstep.config import StepLimits
from lockstep.kernels.recurrent.history import state_grid
from lockstep.kernels.sampling import SamplingState
from lockstep.kernels.step_metadata import RowTensors, advance_rows, prepare_step
from lockstep.kernels.stream_copies import copy_to_device
from lockstep.layers.build_context import BuildContext
from lockstep.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS
from lockstep.step import StepContext, StepShape, Verdict, flush_after

WORD_BITS = 32
"""Tokens in a word of `allowed`."""


class StepInputs:
    """What the host says of a step: fixed columns, one entry per row of the step.

    row_ids int64, 0 where a row pads the step; query_lens, state_src (0: the row's own slot) and
    snapshot_slots, int32, are read by prompt steps only. One storage: one copy brings them all.
    """

    def __init__(self, rows: int, device: str) -> None:
        self.rows = rows
        self.storage = torch.zeros(5 * rows, dtype=torch.int32, device=device)
        row_ids, *others = self.storage.split([2 * rows, rows, rows, rows])
        self.row_ids = row_ids.view(torch.int64)
        self.query_lens, self.state_src, self.snapshot_slots = others

    def fill(self, **columns: list[int]) -> None:
        """Writes each column's head and zeroes the rest: what is not named is null."""
        host = StepInputs(self.rows, "cpu")
        for name, values in columns.items():
            getattr(host, name)[: len(values)] = torch.tensor(values)
        copy_to_device(host.storage, self.storage)


class RowTable(RowTensors):
    """R = max_num_seqs + 1 rows. Each holds max_model_len tokens and a few windows of drafts.

    allowed [N, ceil(V / 32)] int32: for each logit row of a step the bits of the tokens that a
    grammar lets come there; what stands there for rows without a grammar is not read.
    """

    def __init__(self, plan: StepLimits, build: BuildContext, vocab: int) -> None:
        rows = plan.max_num_seqs + 1
        device = plan.device

        def full(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        super().__init__(
            tokens=full(0, torch.int64, plan.history_len),
            prompt_len=full(0, torch.int32),
            computed=full(0, torch.int32),
            folded=full(0, torch.int32),
            drafts=full(-1, torch.int64, max(plan.query_len - 1, 0)),
            draft_limit=full(0, torch.int32),
            page_table=full(0, torch.int32, plan.row_columns),
            state_slots=full(0, torch.int32),
        )
        bad_words = (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self.sampling = SamplingState.empty(rows, vocab, MAX_STOP_IDS + 4, bad_words, device)
        self.inputs = StepInputs(rows, device)
        decided = plan.max_num_seqs * plan.query_len
        words = -(-vocab // WORD_BITS)
        self.allowed = torch.full((decided, words), -1, dtype=torch.int32, device=device)
        self.page_size = plan.page_size
        self.flush = flush_after(device)
        self.state_grid = state_grid(build.state_dtype)
        build = build.at("table")
        self.prepare_op = build.op(prepare_step)
        self.advance_op = build.op(advance_rows)

    def row_tensors(self) -> list[Tensor]:
        """What makes a row besides pages and state: moved to the host when it is preempted."""
        own = [self.tokens, self.prompt_len, self.computed, self.folded, self.drafts]
        return own + [self.draft_limit] + self.sampling.tensors()

    def prepare(self, shape: StepShape) -> StepContext:
        """The step that the inputs ask for, at the rows' own lengths."""
        given = self.inputs
        rows = shape.rows
        row_ids = given.row_ids[:rows]
        sources = given.state_src[:rows]
        lengths = given.query_lens[:rows] if shape.prompt else None
        sizes = (shape.tokens, shape.query_len, self.page_size)
        found = vars(self.prepare_op(self, row_ids, lengths, sources, *sizes))
        ends = found.pop("ends")
        return StepContext(
            shape=shape,
            row_ids=row_ids,
            snapshot_slots=given.snapshot_slots[:rows],
            flush=self.flush,
            logit_rows=ends if shape.prompt else slice(None),
            **found,
        )

    def accept_and_commit(self, step: StepContext, tokens: Tensor) -> Verdict:
        """Commits the target's tokens [S, Q] as far as the drafts of the step agree with them."""
        accepted, results = self.advance_op(
            self,
            self.sampling.counts,
            step.row_ids,
            tokens,
            step.drafts,
            step.seq_lens,
            self.flush,
            self.state_grid,
            step.shape.prompt,
        )
        return Verdict(tokens, accepted, results)
