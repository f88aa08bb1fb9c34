"""Suffix lookup: what followed the longest end of the text where it last stood, in the row's own
history or in an answer that has ended (Oliaro et al., SuffixDecoding, arXiv 2411.04975).

Of all occurrences the longest counts, and of those the latest; nothing is counted, so that one pass
over the texts is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from lockstep.kernels.drafting import ngram_lookup
from lockstep.kernels.stream_copies import copy_to_device
from lockstep.settings import setting
from lockstep.spec.config import SpeculativeConfig
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict

NEEDS_MODULE = False
MOST_DEPTH = 64
"""Tokens of the longest suffix that may be looked up."""
MOST_KEPT = 1 << 20
"""Tokens of the most answers that may be kept."""


@dataclass(frozen=True)
class Options(SpeculativeConfig):
    """The keys of this method."""

    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = setting(
        24, "tokens of the longest suffix that is looked up"
    )
    suffix_lookup_min: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = setting(
        2, "tokens of the shortest suffix that is looked up; above the longest, it is that one"
    )
    suffix_cache_tokens: Annotated[int, Field(ge=0, le=MOST_KEPT)] = setting(
        65536, "tokens of ended answers that are kept, the latest ones; 0: the row's own text alone"
    )


class SuffixDrafter:
    """Looks the end of each row's text up in it and in a ring of answers.

    texts [N] int64: answers, each with -1 behind it, the latest in the place of the oldest; -1
    where there is none yet. oldest [1] int64: where the next one goes.
    """

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.ngram_lookup = context.op(ngram_lookup)
        options: Options = context.config
        self.longest = options.suffix_decoding_max_tree_depth
        self.shortest = min(options.suffix_lookup_min, self.longest)
        self.room = options.suffix_cache_tokens
        self.next = 0
        device = context.tokens.device
        self.texts = torch.full((self.room,), -1, dtype=torch.int64, device=device)
        self.oldest = torch.zeros(1, dtype=torch.int64, device=device)
        context.on_answer.append(self.learn)

    @torch.inference_mode()
    def learn(self, answer: Sequence[int]) -> None:
        """Keeps the tokens of an answer, as many of the last ones as there is room for; in the
        order of device work."""
        if self.room == 0:
            return
        kept = torch.tensor([*answer[max(len(answer) - self.room + 1, 0) :], -1])
        behind = min(len(kept), self.room - self.next)
        for part, place in ((kept[:behind], self.next), (kept[behind:], 0)):
            if len(part):
                copy_to_device(part, self.texts[place : place + len(part)])
        self.next = (self.next + len(kept)) % self.room
        copy_to_device(self.next, self.oldest)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Writes as many drafts per row as the step asks for, -1 where nothing is found."""
        c = self.context
        self.ngram_lookup(
            c.tokens,
            c.computed,
            self.texts,
            self.oldest,
            c.drafts[:, : step.shape.next_drafts],
            step.row_ids,
            self.shortest,
            self.longest,
        )


def create(context: DraftContext) -> SuffixDrafter:
    """The drafter of this file."""
    return SuffixDrafter(context)
