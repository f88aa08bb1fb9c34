"""Rule by which the decode step and the prompt step of a schedule share one forward pass.

A decode step reads all weights for few tokens. In the pass of a prompt step these reads cost
nothing more. No answer depends on the rule.
"""

from collections.abc import Callable

from torch import nn

from lockstep.config import StepLimits
from lockstep.step import StepShape

JoinRule = Callable[[StepShape, StepShape], bool]
"""Rule: (shape of the decode step, shape of the prompt step) -> whether one pass computes both."""


def join_rule(limits: StepLimits, model: nn.Module) -> JoinRule:
    """Return the rule of an engine."""
    if limits.device == "cpu":
        return always_join
    return never_join


def always_join(decode: StepShape, prompt: StepShape) -> bool:
    """Return True."""
    return True


def never_join(decode: StepShape, prompt: StepShape) -> bool:
    """Return False."""
    return False
