"""Oracle drafter: propose stored outputs, half of them with a wrong draft at every fifth position.

Whatever the weights, every number of drafts is accepted at some step. CheckHooks.drafter replaces
the drafter that speculative_config names with this one; K comes from the speculative_config.
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
WRONG_EVERY = (5, 41)
"""Positions that are multiples of this get a wrong draft, in texts of even and of odd index. Whole
windows are accepted only where wrong drafts are rare."""
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
        self.periods = torch.tensor(WRONG_EVERY, device=device)
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
        context = self.context
        rows = step.row_ids
        count = step.shape.next_drafts
        tokens = context.tokens[rows]
        lengths = context.computed[rows].long() + 1
        # Columns beyond a row's length match any text, so a row is compared as a prefix.
        unseen = self.columns >= lengths[:, None]
        matches = ((tokens[:, None] == self.texts) | unseen[:, None]).all(-1)
        positions = lengths[:, None] + self.offsets[:count]
        indices = matches.int().argmax(1)
        text = self.texts[indices]
        periods = self.periods[indices % len(WRONG_EVERY)][:, None]
        targets = text.gather(1, positions.clamp_max(text.shape[1] - 1))
        valid = matches.any(1, keepdim=True) & (targets >= 0) & (lengths[:, None] % NONE_EVERY > 0)
        # abs: token 0 becomes the valid wrong token 1 instead of -1, which means no draft.
        drafts = torch.where(positions % periods == 0, (targets - 1).abs(), targets)
        context.drafts[rows, :count] = torch.where(valid, drafts, -1)
