"""Prompt lookup (Saxena, 2023): drafts are the tokens after the latest earlier match of an
n-gram.
"""

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
MAX_LOOKUP = 16
"""Maximum tokens of an n-gram."""


@dataclass(frozen=True)
class Options(SpeculativeConfig):
    """Keys of this method."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = setting(
        4,
        "tokens of the longest n-gram that is looked up",
        remedy="Change prompt_lookup_max or prompt_lookup_min.",
    )
    prompt_lookup_min: Annotated[int, Field(ge=1, le=MAX_LOOKUP)] = setting(
        2,
        "tokens of the shortest n-gram that is looked up, at most prompt_lookup_max",
        remedy="Choose it no larger than prompt_lookup_max.",
    )

    def adapter(self, name: str) -> TypeAdapter[Any]:
        """Bound prompt_lookup_min by prompt_lookup_max, which is checked before it."""
        if name == "prompt_lookup_min":
            return strict_adapter(Annotated[int, Field(ge=1, le=self.prompt_lookup_max)])
        return super().adapter(name)


class NgramDrafter:
    """Drafter that looks up n-grams of prompt_lookup_max..min tokens in the row's own history."""

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.ngram_lookup = context.op(ngram_lookup)
        device = context.tokens.device
        # The op also serves the suffix drafter, which has texts of complete answers.
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
        """Write the drafts of the next step: the tokens after the latest earlier match, else -1."""
        c = self.context
        drafts = c.drafts[:, : step.shape.next_drafts]
        rows = step.row_ids
        texts = (self.no_texts, self.oldest)
        self.ngram_lookup(c.tokens, c.computed, *texts, drafts, rows, self.shortest, self.longest)


def create(context: DraftContext) -> NgramDrafter:
    """Return the drafter."""
    return NgramDrafter(context)
