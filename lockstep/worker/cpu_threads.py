"""by_work(run_step): something called just like it that runs small steps on one CPU thread.

torch cuts an op among all its threads, and they meet at its end. A step has tens of ops a layer,
and waking a sleeping thread for each costs more than a small op itself (docs/decisions/0009).
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lockstep.kernels.threads import one_thread
from lockstep.step import GRID, StepShape
from lockstep.worker.program import Forwarded, Outcome, RunStep

LITTLE = 5e8
"""Operations in a layer; a step of fewer is faster on one thread."""


def by_work(run_step: RunStep, model: nn.Module) -> RunStep:
    """run_step on one thread where the step has little work, else on as many as torch has."""
    per_token = layer_work(model)

    def threads_of(shape: StepShape) -> AbstractContextManager[None]:
        return one_thread() if is_little(per_token, shape.tokens) else nullcontext()

    def forward(shape: StepShape) -> Forwarded:
        with threads_of(shape):
            return run_step.forward(shape)

    def decide(forwarded: Forwarded) -> Outcome:
        with threads_of(forwarded.step.shape):
            return run_step.decide(forwarded)

    return RunStep(forward, decide)


def layer_work(model: nn.Module) -> int:
    """Operations of one layer for one token: two a parameter, the mean over all layers."""
    blocks = model.get_submodule("blocks")
    return 2 * sum(p.numel() for p in blocks.parameters()) // len(list(blocks.children()))


def is_little(per_token: int, tokens: int) -> bool:
    """Whether a step of so many tokens is faster on one thread.

    More than GRID tokens are more ops, not larger ones: recurrent layers walk through them in
    chunks, and attention and products in tiles.
    """
    return per_token * min(tokens, GRID) < LITTLE
