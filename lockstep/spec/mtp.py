"""MTP: the checkpoint's own next-token module, reapplied for K drafts.

The module reads the target's final hidden state of a position and the token after it. Over the step
that was just verified it fills its own KV with true hidden states; then it runs on from the last
committed position, feeding itself. Positions past a mismatch are overwritten by the next step.
Where nothing is drafted it only keeps the keys and values, so that later drafts see no gap.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.spec import DraftContext, last_emitted, no_drafts
from lockstep.step import Step, StepShape, Verdict

NEEDS_MODULE = True


class MTPDrafter:
    """K drafts from one module."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context

    def propose(
        self, step: Step, hidden: Tensor, taps: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Writes drafts for each row. Sampled rows draft with the noise of the position itself."""
        c, rows, count = self.context, step.row_ids, step.shape.drafts
        c.drafts[rows, count:] = -1
        limit = c.tokens.shape[1] - 1
        after = token = c.tokens[rows[step.token_rows], (step.positions + 1).clamp_max(limit)]
        if not count:
            c.module.keep(after, hidden, step)
            return
        last = last_emitted(step, verdict)
        hidden = c.module(after, hidden, step)[last]
        position = step.positions[last]
        for k in range(count):
            if k:
                hidden = c.module(token, hidden, self._single(step, position))
            logits = c.module.head(hidden)[:, None]
            token = c.sample(logits, position[:, None] + 2, no_drafts(rows), rows)[:, 0]
            c.drafts[rows, k] = token
            position = position + 1

    def _single(self, step: Step, position: Tensor) -> Step:
        """The step's rows with one token each, at `position` [S]."""
        rows, size = step.shape.rows, self.context.page_size
        column = (position // size).clamp_max(step.page_table.shape[1] - 1)
        page = step.page_table.gather(1, column[:, None])[:, 0].long()
        index = torch.arange(rows + 1, device=position.device)
        return replace(
            step,
            shape=StepShape.uniform(rows, 1),
            positions=position,
            token_rows=index[:-1],
            cu_seqlens=index.int(),
            starts=position.int(),
            seq_lens=position.int() + 1,
            slot_mapping=page * size + position % size,
            logit_rows=index[:-1],
        )


def create(context: DraftContext) -> MTPDrafter:
    """The drafter of this file."""
    return MTPDrafter(context)
