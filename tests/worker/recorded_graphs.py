"""Counts of recorded CUDA graphs, for tests."""

from typing import Any

from lockstep.step import StepShape
from lockstep.worker.capture import CapturedFunction
from lockstep.worker.program import Forwarded


def num_decode_graphs(captured: CapturedFunction) -> int:
    """Return the number of graphs of decode steps, or of pieces of any step."""
    return sum(_is_of_decode_step(key[0]) for key in captured.recordings)  # type: ignore[index]


def _is_of_decode_step(argument: Any) -> bool:
    """Return whether the first argument of a captured call belongs to a decode step."""
    shape = argument.step.shape if isinstance(argument, Forwarded) else argument
    return shape.is_decode if isinstance(shape, StepShape) else True
