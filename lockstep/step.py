"""Data of one step that every layer receives: its static shape and its device tensors.

A step is one ragged batch of rows. T tokens, S rows, Q query length, P pages of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

GRID = 64
"""Token grid on which prompt chunks, snapshots and pages end, counted from position 0."""
PAGE_SIZE = GRID
"""Tokens of a page: a prefix hit ends where both a page and a snapshot of state end."""


def flush_after(device: str) -> int:
    """Return how many tokens a recurrent state may lack before a decode step writes it.

    Replaying tokens costs a GPU less than writing the state each time; a CPU, more. H200, 64 rows,
    us per layer at 4, 5, 6 and 8: 89.0, 87.4, 87.8 and 89.9 for one token per row, 146.0, 141.3,
    141.2 and 142.3 for four.
    """
    return 5 if device.startswith("cuda") else 1


NEVER_FLUSH = 2**31 - 1
"""Value of StepContext.flush for a step that writes no state, since its tokens may be rejected."""


@dataclass(frozen=True)
class StepShape:
    """Static shape of a step: the key of a captured program.

    rows: S, null rows included. tokens: T over all rows. query_len: maximum tokens of a row.
    prompt: a ragged step of prompt chunks; other steps are uniform: tokens == rows * query_len.
    next_drafts: drafts per row that the step proposes for the next one. forced: a uniform step of
    forced tokens, whose query_len may exceed that of decode steps; StepContext.committed says how
    many tokens of a row it computes, the others are padding.
    """

    rows: int
    tokens: int
    query_len: int
    prompt: bool = False
    next_drafts: int = 0
    forced: bool = False

    @property
    def is_decode(self) -> bool:
        """Return whether the step continues answers by generated tokens."""
        return not (self.prompt or self.forced)

    @property
    def padded(self) -> bool:
        """Return whether any row of a prompt step with several ones may have all of its tokens.

        Its last row is the null row then. The tokens past the prompts belong to that row, and no
        layer uses them.
        """
        return self.prompt and self.rows > 1 and self.query_len == self.tokens

    @property
    def is_captured(self) -> bool:
        """Return whether the step runs as a graph, where graphs are used: prompts that are not
        padded have any shape, and so do windows of forced tokens of several rows.
        """
        return self.is_decode or self.padded or (self.forced and self.rows == 1)

    @classmethod
    def uniform(cls, rows: int, query_len: int) -> "StepShape":
        """Return the shape of a step in which every row brings its last token and query_len - 1
        drafts.

        The step proposes as many drafts for the next one.
        """
        return cls(rows, rows * query_len, query_len, next_drafts=query_len - 1)


Mix = Callable[..., Tensor]
"""Inner function of a mixer: (tensors [T, ...] of one step, its StepContext) -> [T, ...]."""


@dataclass(kw_only=True)
class ForwardContext(ABC):
    """Context of a forward pass, which every sublayer receives. Integers are int32 unless noted.

    A pass computes one step (StepContext) or several (JointContext). T tokens are those of all
    steps. A mixer reads its step's context within mix(); other sublayers read the fields below.

    token_ids [T] (int64). Optional inputs, None unless a request uses them: adapter_ids [T] LoRA
    adapter of each token (0: none); input_embeds [N', H] embeddings that replace those of token
    ids, for the tokens embed_index [N'] (int64); rope_positions [D, T] (int64) rotary positions of
    D dimensions.
    """

    token_ids: Tensor
    adapter_ids: Tensor | None = None
    input_embeds: Tensor | None = None
    embed_index: Tensor | None = None
    rope_positions: Tensor | None = None

    @property
    @abstractmethod
    def steps(self) -> Sequence["StepContext"]:
        """Steps of the pass, in the order of their tokens."""

    @abstractmethod
    def mix(self, function: Mix, *tensors: Tensor) -> Tensor:
        """Call a mixer's inner function for each step, with the rows of tensors [T, ...] that
        belong to it, and return the results as one tensor [T, ...].
        """

    @abstractmethod
    def at_logit_rows(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [N, H] of hidden [T, H] whose logits are computed."""

    @property
    def token_inputs(self) -> tuple[Tensor | None, ...]:
        """Optional inputs of single tokens, which sublayers other than mixers may read too."""
        return (self.adapter_ids, self.input_embeds, self.embed_index, self.rope_positions)

    def with_token_inputs(self, inputs: tuple[Tensor | None, ...]) -> Self:
        """Return the same context with other optional inputs, in the order of token_inputs."""
        adapter_ids, input_embeds, embed_index, rope_positions = inputs
        return replace(
            self,
            adapter_ids=adapter_ids,
            input_embeds=input_embeds,
            embed_index=embed_index,
            rope_positions=rope_positions,
        )


@dataclass(kw_only=True)
class StepContext(ForwardContext):
    """Context of one step. Integers are int32 unless noted.

    row_ids [S] rows of the device table (int64); positions [T] (int64); token_rows [T] index of
    each token's row in S (int64); cu_seqlens [S + 1]; starts [S] tokens committed before this step;
    seq_lens [S] = starts + query lengths; page_table [S, P]; slot_mapping [T] (int64) page *
    page_size + offset.

    Recurrent state: state_slots [S] (int64) slot of a row's state; state_src [S] (int64) slot from
    which a prompt chunk reads its initial state (a snapshot, or the row's state); snapshot_slots
    [S] slot to which a prompt chunk writes the state of its last grid point (0: none); folded [S]
    number of the row's first tokens that its state already contains; flush: a decode step writes
    the state of a row that lacks this many tokens or more. committed [S] number of a row's leading
    tokens that stay, whatever the target emits: all of a prompt chunk, else its last token and the
    forced tokens after it; None: one.

    drafts [S, Q - 1]: draft tokens among token_ids, -1 for none (uniform steps). logit_rows: index
    into T of the N tokens whose logits are computed: a slice of all, or [S] (int64), each row's
    last token. sample_at [S, N / S] (int64): positions of the tokens that these logits sample.
    """

    shape: StepShape
    row_ids: Tensor
    positions: Tensor
    token_rows: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    state_slots: Tensor
    state_src: Tensor
    snapshot_slots: Tensor
    folded: Tensor
    flush: int
    drafts: Tensor
    logit_rows: Tensor | slice
    sample_at: Tensor
    committed: Tensor | None = None

    @property
    def steps(self) -> Sequence["StepContext"]:
        return (self,)

    def mix(self, function: Mix, *tensors: Tensor) -> Tensor:
        return function(*tensors, self)

    def at_logit_rows(self, hidden: Tensor) -> Tensor:
        return hidden[self.logit_rows]


@dataclass(kw_only=True)
class JointContext(ForwardContext):
    """Context of a forward pass over several steps: the tokens of the first one come first.

    parts: contexts of the steps, each prepared from the row table for itself.
    """

    parts: tuple[StepContext, ...]

    @classmethod
    def of(cls, parts: Sequence[StepContext]) -> "JointContext":
        """Return the context of a pass over these steps."""
        begins = accumulate((part.shape.tokens for part in parts), initial=0)
        indices = [
            None if part.embed_index is None else part.embed_index + begin
            for begin, part in zip(begins, parts, strict=False)
        ]
        return cls(
            parts=tuple(parts),
            token_ids=torch.cat([part.token_ids for part in parts]),
            adapter_ids=_joined([part.adapter_ids for part in parts]),
            input_embeds=_joined([part.input_embeds for part in parts]),
            embed_index=_joined(indices),
            rope_positions=_joined([part.rope_positions for part in parts], dim=1),
        )

    @property
    def steps(self) -> Sequence[StepContext]:
        return self.parts

    def mix(self, function: Mix, *tensors: Tensor) -> Tensor:
        inputs = zip(*map(self._split, tensors), strict=True)
        steps = zip(inputs, self.parts, strict=True)
        return torch.cat([function(*step_inputs, part) for step_inputs, part in steps])

    def at_logit_rows(self, hidden: Tensor) -> Tensor:
        hidden_by_step = zip(self._split(hidden), self.parts, strict=True)
        return torch.cat([part.at_logit_rows(step_hidden) for step_hidden, part in hidden_by_step])

    def _split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a tensor [T, ...] that belong to each step."""
        return tensor.split([part.shape.tokens for part in self.parts])


def _joined(tensors: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """Return the optional inputs of several steps as one tensor; None where no step has them."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, dim) if present else None


@dataclass
class Verdict:
    """Decision of the target model about one step.

    tokens [S, Q] (int64): the token that a row emits after each position: a forced one, or the
    target's, -1 for none (see kernels.sampling). accepted [S] (int32): number of leading drafts
    that equal these tokens; a row emits tokens[s, : accepted[s] + 1]. results [S, Q + 4] (int64):
    tokens, accepted, the number of drafts that the row had, and its first forced token that the
    target would not have emitted (see kernels.step_metadata.advance_rows), in one tensor for a
    single copy to the host.
    """

    tokens: Tensor
    accepted: Tensor
    results: Tensor
