"""A step: forward, then decide. The whole device side, in two halves.

Between them the host may bring what only the tokens of the step before can tell: grammars' masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.step import StepContext, StepShape, Verdict
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler

Outcome = tuple[StepContext, Tensor, Tensor, Verdict]
"""A step, its hidden states [T, H], its raw logits [N, V], and the verdict."""


@dataclass(eq=False)
class Forwarded:
    """What forward leaves for decide: hidden [T, H], logits [N, V], raw.

    Compared by identity: the tensors of a graph are the same ones at every replay.
    """

    step: StepContext
    hidden: Tensor
    aux_hidden_states: tuple[Tensor, ...]
    logits: Tensor

    def __repr__(self) -> str:
        return repr(self.step.shape)


class Target(Protocol):
    """A model, as a step needs it."""

    def __call__(self, step: StepContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """-> hidden [T, H], aux_hidden_states."""
        ...

    def logits(self, hidden: Tensor, step: StepContext) -> Tensor:
        """-> [N, V] at the step's logit rows."""
        ...


class Drafter(Protocol):
    """Fills the table's drafts for the next step."""

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Called at the end of every step: the table is advanced, its rows have no drafts."""
        ...


class Program:
    """One step, from the table to the table. Captured or not, this is all there is to it.

    on_answer: called with the tokens of answers that have come to their end, as drafters asked.
    """

    def __init__(
        self,
        table: RowTable,
        model: Target,
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
        """The logits of the step of the table's inputs."""
        step = self.table.prepare(shape)
        hidden, aux_hidden_states = self.model(step)
        return Forwarded(step, hidden, aux_hidden_states, self.model.logits(hidden, step))

    def decide(self, forwarded: Forwarded) -> Outcome:
        """The target's tokens, committed, and the drafts of the next step."""
        step = forwarded.step
        tokens = self.sampler.sample_target(forwarded.logits, step)
        verdict = self.table.accept_and_commit(step, tokens)
        self.drafter.propose(step, forwarded.hidden, forwarded.aux_hidden_states, verdict)
        return step, forwarded.hidden, forwarded.logits, verdict


def nothing() -> None:
    """Where nothing has to be done between the halves of a step."""


class RunStep(NamedTuple):
    """Runs a step by its halves, each captured or not."""

    forward: Callable[[StepShape], Forwarded]
    decide: Callable[[Forwarded], Outcome]

    def __call__(self, shape: StepShape, between: Callable[[], None] = nothing) -> Outcome:
        """between: called once forward is launched and decide is not."""
        forwarded = self.forward(shape)
        between()
        return self.decide(forwarded)
