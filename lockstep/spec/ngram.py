"""Prompt lookup (Saxena, 2023): what followed the last tokens the last time they stood there."""

import torch
from torch import Tensor

from lockstep.spec import DraftContext
from lockstep.step import Step, Verdict

NEEDS_MODULE = False


class NgramDrafter:
    """Looks the longest n-gram of prompt_lookup_max..min tokens up in the row's own history."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        device = context.tokens.device
        self.where = torch.arange(context.tokens.shape[1], device=device)
        self.ahead = torch.arange(context.drafts.shape[1], device=device)

    def propose(
        self, step: Step, hidden: Tensor, taps: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Writes up to as many drafts per row as the step asks for: the tokens after the latest
        earlier match, else -1."""
        c, rows, count = self.context, step.row_ids, step.shape.drafts
        c.drafts[rows, count:] = -1
        if not count:
            return
        tokens, known = c.tokens[rows], c.computed[rows].long() + 1
        follow = torch.zeros_like(known)
        for n in range(c.config.prompt_lookup_min, c.config.prompt_lookup_max + 1):
            found = self._after_match(tokens, known, n)
            follow = torch.where(found > 0, found, follow)
        source = follow[:, None] + self.ahead[:count]
        real = (follow[:, None] > 0) & (source < known[:, None])
        drafts = tokens.gather(1, source.clamp_max(tokens.shape[1] - 1))
        c.drafts[rows, :count] = torch.where(real, drafts, -1)

    def _after_match(self, tokens: Tensor, known: Tensor, n: int) -> Tensor:
        """[S]: the position after the latest earlier occurrence of the last n tokens, or 0."""
        length = tokens.shape[1]
        match = (self.where + n < known[:, None]) & (known[:, None] > n)
        for i in range(n):
            last = tokens.gather(1, (known - n + i).clamp_min(0)[:, None])
            match[:, : length - i] &= tokens[:, i:] == last
        return ((self.where + n) * match).amax(1)


def create(context: DraftContext) -> NgramDrafter:
    """The drafter of this file."""
    return NgramDrafter(context)
