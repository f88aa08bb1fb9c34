"""Oracle drafter: propose the lengths answer, wrong at every fifth position and silent at some.

Whatever the weights, every number of drafts is accepted at some step. CheckHooks.drafter puts it in
the positions of the drafter that speculative_config names, which says K.
"""

import torch
from torch import Tensor

from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict

NAME = "oracle"
"""Name of this drafter in setups, scenarios and reports."""
PLACEHOLDER_METHOD = "ngram"
"""Method that speculative_config names; this drafter replaces it."""
MAX_TEXTS = 32
"""Maximum texts that the drafter stores."""
WRONG_EVERY = 5
"""Positions that are multiples of this get a wrong draft."""
NONE_EVERY = 11
"""Row lengths that are multiples of this get no drafts."""


class OracleDrafter:
    """Drafter that proposes stored texts.

    texts [MAX_TEXTS, L]: token ids of prompts with their outputs, padded with -1.
    """

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        shape = (MAX_TEXTS, context.tokens.shape[1])
        device = context.tokens.device
        self.texts = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.columns = torch.arange(shape[1], device=device)
        self.offsets = torch.arange(context.drafts.shape[1], device=device)

    @torch.inference_mode()
    def set_texts(self, texts: list[list[int]]) -> None:
        """Store at most MAX_TEXTS texts. Rows that are prefixes of one get drafts from now on."""
        self.texts.fill_(-1)
        for row, text in zip(self.texts, texts, strict=False):
            row[: len(text)] = torch.tensor(text)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Write the step's number of drafts for each row that is a prefix of a text, else -1."""
        c = self.context
        rows = step.row_ids
        count = step.shape.next_drafts
        tokens = c.tokens[rows]
        lengths = c.computed[rows].long() + 1
        unseen = self.columns >= lengths[:, None]
        matches = ((tokens[:, None] == self.texts) | unseen[:, None]).all(-1)
        positions = lengths[:, None] + self.offsets[:count]
        text = self.texts[matches.int().argmax(1)]
        targets = text.gather(1, positions.clamp_max(text.shape[1] - 1))
        valid = matches.any(1, keepdim=True) & (targets >= 0) & (lengths[:, None] % NONE_EVERY > 0)
        drafts = torch.where(positions % WRONG_EVERY == 0, (targets - 1).abs(), targets)
        c.drafts[rows, :count] = torch.where(valid, drafts, -1)
