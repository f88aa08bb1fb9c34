"""MTP: the checkpoint's own next-token module, reapplied for K drafts.

The module reads the target's final hidden state of a position and the token after it. Over the step
that was just verified it fills its own KV with true hidden states; then it runs on from the last
committed position, feeding itself. Positions past a mismatch are overwritten by the next step.
Where nothing is drafted it only keeps the keys and values, so that later drafts see no gap.
"""

from dataclasses import replace

from torch import Tensor

from lockstep.kernels.drafting import mtp_inputs, next_draft_step
from lockstep.spec import DraftContext, no_drafts
from lockstep.step import Step, StepShape, Verdict

NEEDS_MODULE = True


class MTPDrafter:
    """K drafts from one module."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.mtp_inputs = context.op(mtp_inputs)
        self.next_draft_step = context.op(next_draft_step)

    def propose(
        self, step: Step, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Writes as many drafts per row as the step asks for. Sampled rows draft with the noise of
        the position itself."""
        c, rows, count = self.context, step.row_ids, step.shape.drafts
        where = (step.token_rows, step.positions, step.cu_seqlens)
        window = verdict.tokens.shape[1]
        tokens, last, at = self.mtp_inputs(c.tokens, rows, *where, verdict.accepted, window)
        if not count:
            c.module.keep(tokens, hidden, step)
            return
        hidden = c.module(tokens, hidden, step)[last]
        for k in range(count):
            if k:
                hidden = c.module(step.token_ids, hidden, step)
            logits = c.module.head(hidden)[:, None]
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


def create(context: DraftContext) -> MTPDrafter:
    """The drafter of this file."""
    return MTPDrafter(context)
