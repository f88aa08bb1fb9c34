"""A drafter that knows the answers, wrong at every fifth place and silent at some.

Whatever the weights, every number of drafts is accepted at some step. CheckHooks.drafter puts it in
the place of the drafter that speculative_config names, which says K.
"""

import torch
from torch import Tensor

from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict

NAME = "told"
"""What setups, worlds and reports call this drafter."""
STAND_IN = "ngram"
"""The method that speculative_config names where this drafter takes its place."""
MOST_TEXTS = 32
"""Texts that it knows at once."""
WRONG_EVERY = 5
"""Positions whose drafts are wrong: the multiples of this."""
NONE_EVERY = 11
"""Lengths of known text at which nothing is drafted: the multiples of this."""


class AnswerOracle:
    """texts [MOST_TEXTS, L]: whole rows, prompt and answer, -1 behind their ends."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        shape = (MOST_TEXTS, context.tokens.shape[1])
        device = context.tokens.device
        self.texts = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.where = torch.arange(shape[1], device=device)
        self.ahead = torch.arange(context.drafts.shape[1], device=device)

    @torch.inference_mode()
    def tell(self, texts: list[list[int]]) -> None:
        """At most MOST_TEXTS of them. Rows that begin like one of them get drafts from now on."""
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
        """Writes as many drafts as the step asks for, per row that begins like a text, else -1."""
        c = self.context
        rows = step.row_ids
        count = step.shape.next_drafts
        tokens = c.tokens[rows]
        known = c.computed[rows].long() + 1
        behind = self.where >= known[:, None]
        same = ((tokens[:, None] == self.texts) | behind[:, None]).all(-1)
        place = known[:, None] + self.ahead[:count]
        text = self.texts[same.int().argmax(1)]
        right = text.gather(1, place.clamp_max(text.shape[1] - 1))
        real = same.any(1, keepdim=True) & (right >= 0) & (known[:, None] % NONE_EVERY > 0)
        drafts = torch.where(place % WRONG_EVERY == 0, (right - 1).abs(), right)
        c.drafts[rows, :count] = torch.where(real, drafts, -1)
