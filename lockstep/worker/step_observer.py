"""Observers of a worker's steps, for checks and traces. They change nothing."""

from collections.abc import Sequence

from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepShape
from lockstep.worker.program import Outcome


class StepObserver:
    """Base class of observers, called around every step that a schedule launches.

    Two steps may share a forward pass. Then before_step() is called for both before the pass, and
    after_step() for each as soon as it is decided. The next step may overwrite the tensors that an
    observer gets: it copies what it keeps.
    """

    def before_step(self, rows: Sequence[RowSpec], shape: StepShape) -> None:
        """Observe a step of these rows, in their order in the step, before it runs."""

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        """Observe a step that is launched; the device may still run it. Its logits are whole."""
