"""A chain of drafts: one module, applied K times, each time to the draft that it has just made.

The module reads what it makes of the target's hidden states at a position, and the token after it.
Over the step that was just verified it fills its own KV from true hidden states; then it runs on
from the last committed position, feeding itself. Positions past a mismatch are overwritten by the
next step. Where nothing is drafted it only keeps the keys and values, so that later drafts see no
gap.
"""

from dataclasses import replace

from torch import Tensor

from lockstep.kernels.drafting import mtp_inputs, next_draft_step
from lockstep.spec.drafter import DraftContext, no_drafts
from lockstep.step import Step, StepShape, Verdict


class ChainDrafter:
    """K drafts from one DraftModule."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.mtp_inputs = context.op(mtp_inputs)
        self.next_draft_step = context.op(next_draft_step)

    def propose(
        self, step: Step, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Writes as many drafts per row as the step asks for. Sampled rows draft with the noise of
        the position itself."""
        c, rows, count = self.context, step.row_ids, step.shape.next_drafts
        where = (step.token_rows, step.positions, step.cu_seqlens)
        window = verdict.tokens.shape[1]
        tokens, last, at = self.mtp_inputs(c.tokens, rows, *where, verdict.accepted, window)
        state = c.module.begin(hidden, aux_hidden_states)
        if not count:
            c.module.keep(tokens, state, step)
            return
        state = c.module(tokens, state, step)[last]
        for k in range(count):
            if k:
                state = c.module(step.token_ids, state, step)
            logits = c.module.logits(state)[:, None]
            tokens = c.sample(logits, at, no_drafts(rows), rows)[:, 0]
            step = self._on(step, tokens, k)
            at = step.sample_at

    def _on(self, step: Step, tokens: Tensor, k: int) -> Step:
        """Keeps the rows' drafts number k, tokens [S]: the step of one token each that they are."""
        c, table = self.context, step.page_table
        made = self.next_draft_step(
            c.computed, c.drafts, step.row_ids, tokens, table, k, c.page_size
        )
        shape = StepShape.uniform(step.shape.rows, 1)
        return replace(step, shape=shape, logit_rows=slice(None), **vars(made))
