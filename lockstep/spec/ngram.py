"""Prompt lookup (Saxena, 2023): what followed the last tokens the last time they stood there."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from lockstep.kernels.drafting import ngram_lookup
from lockstep.settings import setting, strict_adapter
from lockstep.spec.config import SpeculativeConfig
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict

NEEDS_MODULE = False
MOST_LOOKUP = 16
"""Tokens of the longest n-gram that may be looked up."""


@dataclass(frozen=True)
class Options(SpeculativeConfig):
    """The keys of this method."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=MOST_LOOKUP)] = setting(
        4,
        "tokens of the longest n-gram that is looked up",
        remedy="Choose the longest n-gram anew.",
    )
    prompt_lookup_min: Annotated[int, Field(ge=1, le=MOST_LOOKUP)] = setting(
        2,
        "tokens of the shortest n-gram that is looked up, at most prompt_lookup_max",
        remedy="Choose it no larger than prompt_lookup_max.",
    )

    def adapter(self, name: str) -> TypeAdapter[Any]:
        """prompt_lookup_min goes up to prompt_lookup_max, which is checked before it."""
        if name == "prompt_lookup_min":
            return strict_adapter(Annotated[int, Field(ge=1, le=self.prompt_lookup_max)])
        return super().adapter(name)


class NgramDrafter:
    """Looks the longest n-gram of prompt_lookup_max..min tokens up in the row's own history."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.ngram_lookup = context.op(ngram_lookup)
        device = context.tokens.device
        self.no_texts = torch.zeros(0, dtype=torch.int64, device=device)
        self.oldest = torch.zeros(1, dtype=torch.int64, device=device)
        self.shortest: int = context.config.prompt_lookup_min
        self.longest: int = context.config.prompt_lookup_max

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Writes as many drafts per row as the step asks for: the tokens after the latest earlier
        match, else -1."""
        c = self.context
        drafts = c.drafts[:, : step.shape.next_drafts]
        rows = step.row_ids
        texts = (self.no_texts, self.oldest)
        self.ngram_lookup(c.tokens, c.computed, *texts, drafts, rows, self.shortest, self.longest)


def create(context: DraftContext) -> NgramDrafter:
    """The drafter of this file."""
    return NgramDrafter(context)
