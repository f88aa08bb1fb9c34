"""Prompt lookup (Saxena, 2023): what followed the last tokens the last time they stood there."""

from torch import Tensor

from lockstep.kernels.drafting import ngram_lookup
from lockstep.spec import DraftContext
from lockstep.step import Step, Verdict

NEEDS_MODULE = False


class NgramDrafter:
    """Looks the longest n-gram of prompt_lookup_max..min tokens up in the row's own history."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.ngram_lookup = context.op(ngram_lookup)

    def propose(
        self, step: Step, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Writes as many drafts per row as the step asks for: the tokens after the latest earlier
        match, else -1."""
        c = self.context
        drafts = c.drafts[:, : step.shape.drafts]
        lengths = (c.config.prompt_lookup_min, c.config.prompt_lookup_max)
        self.ngram_lookup(c.tokens, c.computed, drafts, step.row_ids, *lengths)


def create(context: DraftContext) -> NgramDrafter:
    """The drafter of this file."""
    return NgramDrafter(context)
