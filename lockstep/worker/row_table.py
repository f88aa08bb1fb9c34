"""Row table: one device row per request, the truth for lengths, tokens and drafts.

`prepare` makes a step of it, `accept_and_commit` commits the target's tokens to it. Each is one op
without a host sync, so both belong to the captured step. Row 0 is the null row: it has no committed
tokens, page 0 and state slot 0.
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
from lockstep.worker.adapter_column import adapter_column
from lockstep.worker.prediction_column import prediction_column

WORD_BITS = 32
"""Tokens per word of `allowed`."""
MAX_STEPS_OF_A_PASS = 2
"""Maximum steps that one forward pass computes: a decode step and a prompt step."""


class StepInputs:
    """Host inputs of a step: fixed columns, one entry per row of the step.

    row_ids int64, 0 for padding rows; query_lens, state_src (0: the row's own slot) and
    snapshot_slots, int32, are read by prompt steps only. All columns share one storage, so one copy
    uploads them.
    """

    def __init__(self, rows: int, device: str) -> None:
        self.rows = rows
        # int64 row ids take two int32 columns of the shared storage.
        self.storage = torch.zeros(5 * rows, dtype=torch.int32, device=device)
        row_ids, *columns = self.storage.split([2 * rows, rows, rows, rows])
        self.row_ids = row_ids.view(torch.int64)
        self.query_lens, self.state_src, self.snapshot_slots = columns

    def fill(self, **columns: list[int]) -> None:
        """Upload columns; entries that are not given become null."""
        host = StepInputs(self.rows, "cpu")
        for name, values in columns.items():
            # NumPy takes the numbers in one call, a tenth of the time of a tensor made from them.
            getattr(host, name).numpy()[: len(values)] = values
        copy_to_device(host.storage, self.storage)


class RowTable(RowTensors):
    """Table of R = max_num_seqs + 1 rows, each with max_model_len tokens and a few windows of
    drafts.

    allowed [N, ceil(V / 32)] int32: per logit row of a step, bits of the tokens that a grammar
    allows; not read for rows without a grammar. adapters: adapter of each row. predictions:
    predicted text of each row. pass_inputs: host inputs of the steps of a forward pass; inputs: of
    its first step.
    """

    def __init__(self, plan: StepLimits, build: BuildContext, vocab: int) -> None:
        rows = plan.max_num_seqs + 1
        device = plan.device

        def full(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        super().__init__(
            tokens=full(0, torch.int64, plan.history_len),
            prompt_len=full(0, torch.int32),
            forced_end=full(0, torch.int32),
            computed=full(0, torch.int32),
            folded=full(0, torch.int32),
            drafts=full(-1, torch.int64, max(plan.query_len - 1, 0)),
            draft_limit=full(0, torch.int32),
            page_table=full(0, torch.int32, plan.row_columns),
            state_slots=full(0, torch.int32),
        )
        bad_words = (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
        self.sampling = SamplingState.empty(rows, vocab, MAX_STOP_IDS + 4, bad_words, device)
        self.adapters = adapter_column(tuple(plan.adapters), rows, device)
        self.predictions = prediction_column(plan.has_predictions, rows, plan.max_model_len, device)
        self.pass_inputs = tuple(StepInputs(rows, device) for _ in range(MAX_STEPS_OF_A_PASS))
        self.inputs = self.pass_inputs[0]
        # All bits set: a row whose mask was never uploaded allows every token.
        decided = plan.max_decided
        words = -(-vocab // WORD_BITS)
        self.allowed = torch.full((decided, words), -1, dtype=torch.int32, device=device)
        self.page_size = plan.page_size
        self.flush = flush_after(device)
        self.state_grid = state_grid(build.state_dtype)
        build = build.for_layer("table")
        self.prepare_op = build.op(prepare_step)
        self.advance_op = build.op(advance_rows)

    def row_tensors(self) -> list[Tensor]:
        """Return the tensors of a row, without pages and state, that move when it is preempted."""
        tensors = [self.tokens, self.prompt_len, self.forced_end, self.computed, self.folded]
        tensors += [self.drafts, self.draft_limit]
        tensors += self.sampling.tensors() + self.adapters.tensors()
        return tensors + self.predictions.tensors()

    def prepare(self, shape: StepShape, index: int = 0) -> StepContext:
        """Return the step that the inputs describe, at the rows' own lengths.

        index: of the step in its forward pass.
        """
        inputs = self.pass_inputs[index]
        rows = shape.rows
        row_ids = inputs.row_ids[:rows]
        tensors = self.prepare_op(
            self,
            row_ids,
            inputs.query_lens[:rows] if shape.prompt else None,
            inputs.state_src[:rows],
            shape.tokens,
            shape.query_len,
            self.page_size,
        )
        metadata = vars(tensors)
        ends = metadata.pop("ends")
        return StepContext(
            shape=shape,
            row_ids=row_ids,
            snapshot_slots=inputs.snapshot_slots[:rows],
            flush=self.flush,
            logit_rows=ends if shape.prompt else slice(None),
            adapter_ids=self.adapters.of_tokens(row_ids, metadata["token_rows"]),
            **metadata,
        )

    def accept_and_commit(self, step: StepContext, tokens: Tensor) -> Verdict:
        """Commit forced tokens, and the target's tokens [S, Q] as far as the drafts equal them."""
        emitted, accepted, results = self.advance_op(
            self,
            self.sampling.counts,
            step.row_ids,
            tokens,
            step.drafts,
            step.seq_lens,
            self.flush,
            self.state_grid,
            step.shape.prompt,
            step.shape.forced,
        )
        return Verdict(emitted, accepted, results)
