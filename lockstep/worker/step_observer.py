"""Those who watch a runner's steps: checks and traces. They change nothing."""

from collections.abc import Sequence

from lockstep.scheduling.request import Request
from lockstep.step import StepShape
from lockstep.worker.program import Outcome


class StepObserver:
    """Called around every step that a schedule launches; by itself it does nothing.

    What it gets may be overwritten by the next step, so it copies what it keeps.
    """

    def before_step(self, requests: Sequence[Request], shape: StepShape) -> None:
        """The step of these requests, in the order of its rows, is about to run."""

    def after_step(self, requests: Sequence[Request], shape: StepShape, outcome: Outcome) -> None:
        """All of it is launched; nobody has waited for it."""
