"""Suffix lookup: drafts are the tokens after an earlier match of the text's longest suffix, in the
row's own history or in complete answers (Oliaro et al., SuffixDecoding, arXiv 2411.04975).

The longest match wins, then the latest; matches are not counted, so one pass over the texts is
enough.
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
MAX_DEPTH = 64
"""Maximum tokens of a suffix."""
MAX_TOKENS = 1 << 20
"""Maximum tokens of stored answers."""


@dataclass(frozen=True)
class Options(SpeculativeConfig):
    """Keys of this method."""

    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = setting(
        24, "tokens of the longest suffix that is looked up"
    )
    suffix_lookup_min: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = setting(
        2, "tokens of the shortest suffix that is looked up; above the longest, it is that one"
    )
    suffix_cache_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = setting(
        65536, "tokens of ended answers that are kept, the latest ones; 0: the row's own text alone"
    )


class SuffixDrafter:
    """Drafter that looks each row's suffix up in its own text and in a circular buffer of answers.

    texts [N] int64: answers, each followed by -1; the newest overwrites the oldest; -1 where
    unused. next: index of the oldest token, which the next answer overwrites first.
    oldest [1] int64: the same index on the device.
    """

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.ngram_lookup = context.op(ngram_lookup)
        options: Options = context.config
        self.longest = options.suffix_decoding_max_tree_depth
        self.shortest = min(options.suffix_lookup_min, self.longest)
        self.capacity = options.suffix_cache_tokens
        self.next = 0
        device = context.tokens.device
        self.texts = torch.full((self.capacity,), -1, dtype=torch.int64, device=device)
        self.oldest = torch.zeros(1, dtype=torch.int64, device=device)
        context.on_answer.append(self.learn)

    @torch.inference_mode()
    def learn(self, answer: Sequence[int]) -> None:
        """Store the last tokens of an answer, in the order of device work."""
        if self.capacity == 0:
            return
        kept = torch.tensor([*answer[max(len(answer) - self.capacity + 1, 0) :], -1])
        # The answer wraps around the end of the circular buffer.
        num_until_end = min(len(kept), self.capacity - self.next)
        for part, start in ((kept[:num_until_end], self.next), (kept[num_until_end:], 0)):
            if len(part):
                copy_to_device(part, self.texts[start : start + len(part)])
        self.next = (self.next + len(kept)) % self.capacity
        # In the steps' stream, after the tokens: a captured lookup reads both consistently.
        copy_to_device(self.next, self.oldest)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Write the drafts of the next step, -1 where nothing matches."""
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
    """Return the drafter."""
    return SuffixDrafter(context)
