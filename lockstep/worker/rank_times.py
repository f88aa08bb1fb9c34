"""Times of decode steps on each tensor-parallel rank, which show an imbalance between them.

The functions are called with the worker of every rank: see InProcessExecutor.collective_rpc().
"""

from collections import deque
from collections.abc import Sequence

import torch

from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepShape
from lockstep.worker.program import Outcome
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.step_timer import StepTimer
from lockstep.worker.worker import Worker

MAX_STEPS = 4096
"""Steps whose times are kept, the latest: a GPU's timer has two events."""


class StepTimes(StepObserver):
    """Timers of a rank's decode steps, except those that share a prompt step's forward pass.

    device: of its plan. is_timing: the last timer runs.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.timers: deque[StepTimer] = deque(maxlen=MAX_STEPS)
        self.is_timing = False

    def before_step(self, rows: Sequence[RowSpec], shape: StepShape) -> None:
        if shape.is_decode:
            self.timers.append(StepTimer(self.device))
            self.is_timing = True
        elif self.is_timing:
            self.timers.pop()
            self.is_timing = False

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        if self.is_timing:
            self.timers[-1].end()
            self.is_timing = False

    def mean_ms(self) -> float:
        """Wait for the steps and return the mean of their times; 0 without steps."""
        for timer in self.timers:
            timer.wait()
        return sum(timer.ms for timer in self.timers) / max(1, len(self.timers))


def start_step_times(worker: Worker) -> None:
    """Time the decode steps of this rank from now on."""
    worker.observers.append(StepTimes(worker.plan.device))


def end_step_times(worker: Worker) -> list[float]:
    """Return the mean ms of a decode step of each rank since start_step_times()."""
    (times,) = (observer for observer in worker.observers if isinstance(observer, StepTimes))
    worker.observers.remove(times)
    return gather_times(worker, times.mean_ms())


@torch.inference_mode()
def gather_times(worker: Worker, ms: float) -> list[float]:
    """Return the times of all ranks, of which this one has `ms`."""
    local = torch.tensor([ms], dtype=torch.float64, device=worker.plan.device)
    return worker.group.all_gather(local).flatten().tolist()
