"""What a drafter is given, and what a module that drafts looks like."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.models.loader import Source
from lockstep.step import StepContext, Verdict


class DraftModule(Protocol):
    """A module that proposes the token behind each token that it is fed.

    It is fed, at a position, the token after it and a state: first what begin() makes of the
    target's hidden states, then what forward() returned. Its keys and values stand on the target's
    pages. ids [V']: the target's tokens that its head knows, ascending; None: all of them. taps:
    the places whose residual it asks for, ascending (lockstep.models.decoder.Decoder).
    """

    ids: Tensor | None
    taps: tuple[int, ...]

    def source(self) -> Source | None:
        """The checkpoint of its own that it is filled from; None: weights() are the target's."""
        ...

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """The target's hidden states [T, H], and those that were asked for -> states [T, ...]."""
        ...

    def __call__(self, ids: Tensor, state: Tensor, step: StepContext) -> Tensor:
        """Tokens [T] and states [T, ...] -> the next states [T, ...]; keys and values are kept."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """States [S, ...] -> [S, V'] over `ids`."""
        ...

    def keep(self, ids: Tensor, state: Tensor, step: StepContext) -> None:
        """Writes the keys and values of these tokens alone, where no draft is wanted."""
        ...

    def finish(self) -> None:
        """Called once, when its weights and the target's are loaded."""
        ...

    @property
    def head_bytes(self) -> int:
        """Bytes of a head of its own; 0 where it shares the target's."""
        ...


@dataclass
class DraftContext:
    """What a drafter may use. drafts [R, K], tokens [R, L], computed, folded [R]: of the table.

    config: the Options of its method. module: the draft module, where the drafter has built one.
    sample(logits [S, 1, V'], positions [S, 1], no drafts [S, 0], row_ids [S]) -> [S, 1], where V'
    are the tokens that the module's head knows.
    op: the function that serves an op on this device. on_answer: whatever is put there is called
    with the tokens of every answer that has come to its end, between steps, but for those of
    requests with a cache_salt.
    """

    config: Any
    drafts: Tensor
    tokens: Tensor
    computed: Tensor
    folded: Tensor
    page_size: int
    module: Any
    sample: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    op: Callable[[Op], Callable[..., Any]]
    on_answer: list[Callable[[Sequence[int]], None]] = field(default_factory=list)


class NoDrafter:
    """Proposes nothing, ever."""

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Leaves the table's (empty) drafts alone."""


def no_drafts(rows: Tensor) -> Tensor:
    """[S, 0]: sampling with no draft in front."""
    return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
