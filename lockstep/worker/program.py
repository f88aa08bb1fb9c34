"""Program of a step: forward, then decide. Both halves run on the device.

Between them the host may upload what depends on the previous step's tokens: grammar masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.step import StepContext, StepShape, Verdict
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler

Outcome = tuple[StepContext, Tensor, Tensor, Verdict]
"""StepContext, hidden states [T, H], this rank's raw logits [N, n], and verdict."""


@dataclass(eq=False)
class Forwarded:
    """Result of forward for decide: hidden [T, H], this rank's raw logits [N, n].

    Compared by identity: a graph returns the same tensors at every replay.
    """

    step: StepContext
    hidden: Tensor
    aux_hidden_states: tuple[Tensor, ...]
    logits: Tensor

    def __repr__(self) -> str:
        return repr(self.step.shape)


class TargetModel(Protocol):
    """Interface of a model to a step."""

    def __call__(self, step: StepContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return hidden states [T, H] and auxiliary hidden states."""
        ...

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        """Return this rank's logits [N, n] at the step's logit rows."""
        ...


class Drafter(Protocol):
    """Interface of a drafter: it fills the table's drafts for the next step."""

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Propose drafts at the end of a step: the table is advanced, its rows have no drafts."""
        ...


class Program:
    """Program of one step, from the row table back to the row table, captured or not.

    on_answer: callbacks of drafters, called with the tokens of complete answers.
    """

    def __init__(
        self,
        table: RowTable,
        model: TargetModel,
        sampler: Sampler,
        drafter: Drafter,
        on_answer: Sequence[Callable[[Sequence[int]], None]] = (),
    ) -> None:
        self.table = table
        self.model = model
        self.sampler = sampler
        self.drafter = drafter
        self.on_answer = on_answer

    def forward(self, shape: StepShape) -> Forwarded:
        """Compute the logits of the step that the table's inputs describe."""
        step = self.table.prepare(shape)
        hidden, aux_hidden_states = self.model(step)
        return Forwarded(step, hidden, aux_hidden_states, self.model.logits(hidden, step))

    def decide(self, forwarded: Forwarded) -> Outcome:
        """Sample the target's tokens, commit them, and propose drafts for the next step."""
        step = forwarded.step
        tokens = self.sampler.sample_target(forwarded.logits, step)
        verdict = self.table.accept_and_commit(step, tokens)
        self.drafter.propose(step, forwarded.hidden, forwarded.aux_hidden_states, verdict)
        return step, forwarded.hidden, forwarded.logits, verdict


def nothing() -> None:
    """Do nothing between the halves of a step."""


class RunStep(NamedTuple):
    """Function that runs a step as two halves, each captured or not."""

    forward: Callable[[StepShape], Forwarded]
    decide: Callable[[Forwarded], Outcome]

    def __call__(self, shape: StepShape, between: Callable[[], None] = nothing) -> Outcome:
        """Run a step. between: called after forward is launched and before decide is."""
        forwarded = self.forward(shape)
        between()
        return self.decide(forwarded)
