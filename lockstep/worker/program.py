"""Program of a step: forward, then decide. Both halves run on the device.

Between them the host may upload what depends on the previous step's tokens: grammar masks. One
forward pass may compute a decode step and a prompt step, so that both read the weights once. Each
of them is decided for itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lockstep.step import ForwardContext, JointContext, StepContext, StepShape, Verdict
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler

Outcome = tuple[StepContext, Tensor, Tensor, Verdict]
"""StepContext, hidden states [T, H], this rank's raw logits [N, n], and verdict."""


@dataclass(eq=False)
class Forwarded:
    """Result of forward for the decide of one step: hidden [T, H], this rank's raw logits [N, n].

    shapes: of all steps that the forward pass computed. Compared by identity: a graph returns the
    same tensors at every replay.
    """

    step: StepContext
    hidden: Tensor
    aux_hidden_states: tuple[Tensor, ...]
    logits: Tensor
    shapes: tuple[StepShape, ...]

    def __repr__(self) -> str:
        return repr(self.step.shape)


class TargetModel(Protocol):
    """Interface of a model to a step."""

    def __call__(self, ctx: ForwardContext) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return hidden states [T, H] and auxiliary hidden states."""
        ...

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return this rank's logits [N, n] at the logit rows of the pass."""
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

    def forward(self, *shapes: StepShape) -> tuple[Forwarded, ...]:
        """Compute the logits of the steps that the table's inputs describe, in one pass.

        Tokens and logit rows of a step follow those of the steps before it.
        """
        steps = [self.table.prepare(shape, index) for index, shape in enumerate(shapes)]
        ctx = steps[0] if len(steps) == 1 else JointContext.of(steps)
        hidden, aux_hidden_states = self.model(ctx)
        logits = self.model.logits(hidden, ctx)
        tokens = [shape.tokens for shape in shapes]
        aux_parts = [aux.split(tokens) for aux in aux_hidden_states]
        parts = zip(
            steps,
            hidden.split(tokens),
            logits.split([step.sample_at.numel() for step in steps]),
            strict=True,
        )
        return tuple(
            Forwarded(step, step_hidden, tuple(aux[i] for aux in aux_parts), step_logits, shapes)
            for i, (step, step_hidden, step_logits) in enumerate(parts)
        )

    def decide(self, forwarded: Forwarded) -> Outcome:
        """Sample the target's tokens, commit them, and propose drafts for the next step."""
        step = forwarded.step
        tokens = self.sampler.sample_target(forwarded.logits, step)
        verdict = self.table.accept_and_commit(step, tokens)
        self.drafter.propose(step, forwarded.hidden, forwarded.aux_hidden_states, verdict)
        return step, forwarded.hidden, forwarded.logits, verdict

    def run(self, *shapes: StepShape) -> list[Outcome]:
        """Run steps in one forward pass, without graphs."""
        return [self.decide(forwarded) for forwarded in self.forward(*shapes)]


def do_nothing() -> None:
    """Do nothing before decide is launched."""


class RunStep(NamedTuple):
    """Function that runs a step as two halves, each captured or not."""

    forward: Callable[..., tuple[Forwarded, ...]]
    decide: Callable[[Forwarded], Outcome]

    def __call__(self, shape: StepShape, before_decide: Callable[[], None] = do_nothing) -> Outcome:
        """Run a step. before_decide: called after forward is launched and before decide is."""
        (outcome,) = self.run([shape], [before_decide])
        return outcome

    def run(
        self, shapes: Sequence[StepShape], before_decide: Sequence[Callable[[], None]]
    ) -> Iterator[Outcome]:
        """Run steps whose forward halves are one pass; yield each outcome as its step is decided.

        before_decide: one function per step, see __call__().
        """
        halves = zip(self.forward(*shapes), before_decide, strict=True)
        for forwarded, before in halves:
            before()
            yield self.decide(forwarded)
