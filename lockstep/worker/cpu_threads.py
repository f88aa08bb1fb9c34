"""Choice of the number of CPU threads of a step: one thread for small steps.

torch divides an op among all its threads, which meet at its end. A step has tens of ops per layer,
and waking a sleeping thread for each costs more than a small op itself (docs/decisions/0009).
"""

from contextlib import AbstractContextManager, nullcontext
from math import prod

from torch import nn

from lockstep.kernels.threads import one_thread
from lockstep.layers.linear import Weight
from lockstep.step import GRID, StepShape
from lockstep.worker.program import Forwarded, Outcome, RunStep

ONE_THREAD_FLOPS = 5e8
"""Flops per layer and step below which one thread is faster than several."""


def with_step_threads(run_step: RunStep, model: nn.Module) -> RunStep:
    """Return run_step with small steps on one thread and others on torch's number of threads."""
    token_flops = layer_flops(model)

    def threads_of(*shapes: StepShape) -> AbstractContextManager[None]:
        tokens = sum(shape.tokens for shape in shapes)
        is_small = prefers_one_thread(token_flops, tokens)
        return one_thread() if is_small else nullcontext()

    def forward(*shapes: StepShape) -> tuple[Forwarded, ...]:
        with threads_of(*shapes):
            return run_step.forward(*shapes)

    def decide(forwarded: Forwarded) -> Outcome:
        with threads_of(forwarded.step.shape):
            return run_step.decide(forwarded)

    return RunStep(forward, decide)


def layer_flops(model: nn.Module) -> int:
    """Return the flops of one layer for one token: two per weight, mean over all layers."""
    blocks = model.get_submodule("blocks")
    weights = sum(parameter.numel() for parameter in blocks.parameters())
    for module in blocks.modules():
        # Prepacked weights are no parameters.
        if isinstance(module, Weight) and module.weight is None and module.prepacked is not None:
            weights += prod(module.prepacked.shape)
    return 2 * weights // len(list(blocks.children()))


def prefers_one_thread(token_flops: int, tokens: int) -> bool:
    """Return whether a step of `tokens` tokens is faster on one thread.

    token_flops: see layer_flops. More than GRID tokens mean more ops, not larger ones: recurrent
    layers walk through them in chunks, and attention and linears in tiles.
    """
    return token_flops * min(tokens, GRID) < ONE_THREAD_FLOPS
