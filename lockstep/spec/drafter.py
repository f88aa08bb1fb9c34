"""Context of a drafter, and the interface of its draft module.

The interface of a drafter itself is lockstep.worker.program.Drafter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.sampling import LogitShard
from lockstep.models.loader import Source
from lockstep.step import StepContext, Verdict


class DraftModule(Protocol):
    """Module that proposes the token after each token that it reads.

    At a position it reads the next token and a state. The first state is begin() of the target's
    hidden states, each later one is what forward() returned. Its keys and values use the target's
    page tables.
    ids [V']: the target's tokens that its head knows, ascending; None for all.
    aux_hidden_layers: auxiliary hidden states that it reads (lockstep.models.decoder.Decoder).
    """

    ids: Tensor | None
    aux_hidden_layers: tuple[int, ...]

    def source(self) -> Source | None:
        """Return the checkpoint that it is loaded from; None where its weights are the target's."""
        ...

    def begin(self, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return states [T, ...] from the target's hidden states [T, H] and auxiliary ones."""
        ...

    def __call__(self, ids: Tensor, state: Tensor, step: StepContext) -> Tensor:
        """Return the next states [T, ...] from tokens [T] and states [T, ...]; writes KV."""
        ...

    def logits(self, state: Tensor) -> Tensor:
        """Return this rank's logits [S, n] over `ids` from states [S, ...]."""
        ...

    def write_cache(self, ids: Tensor, state: Tensor, step: StepContext) -> None:
        """Write only the keys and values of these tokens, in steps without drafts."""
        ...

    def finish(self) -> None:
        """Prepare the module once, after its weights and the target's are loaded."""
        ...

    @property
    def logit_shard(self) -> LogitShard:
        """Share of the logits over `ids` that this rank returns."""
        ...

    @property
    def head_bytes(self) -> int:
        """Return the bytes of its separate head; 0 where it shares the target's."""
        ...


@dataclass(frozen=True)
class Predictions:
    """Predicted texts of rows.

    texts [R, P] int64: predicted tokens. text_lens [R] int32: number of valid ones in each row.
    prompt_len [R] int32: tokens of each row's prompt, after which the answer begins.
    """

    texts: Tensor
    text_lens: Tensor
    prompt_len: Tensor


@dataclass
class DraftContext:
    """Context of a drafter. drafts [R, K], tokens [R, L], computed, folded [R]: tensors of the row
    table.

    config: Options of its method. module: the draft module, if the method has one. sample(logits
    [S, 1, n], positions [S, 1], no drafts [S, 0], row_ids [S]) -> [S, 1], where the logits are this
    rank's of the tokens that the module's head knows. op: returns the backend of an op on this
    device. on_answer: callbacks that get the tokens of every complete answer, between steps; not of
    requests with a cache_salt. predictions: texts of the rows, None unless the method reads them.
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
    predictions: Predictions | None = None


class NoDrafter:
    """Drafter that proposes nothing."""

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Do nothing."""


def no_drafts(rows: Tensor) -> Tensor:
    """Return [S, 0]: no draft before the sampled position."""
    return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
