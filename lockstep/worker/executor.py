"""Executor with one worker in the calling process."""

from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config import EngineConfig, Plan
from lockstep.models.loader import LoadResult
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.schedule import Results, Schedule
from lockstep.spec import passes_of
from lockstep.worker.build import Progress
from lockstep.worker.device_rates import Rates, rates_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.roofline import StepCosts
from lockstep.worker.startup import MemoryFit, WorkerStartup, smallest_fit
from lockstep.worker.worker import LaunchedStep, Worker


@dataclass(frozen=True)
class Facts:
    """Facts about a built engine, as plain data for whoever shows or serves it.

    loaded: what was read of the checkpoint, None for random weights. costs: bytes and flops of the
    engine's steps.
    """

    config: EngineConfig
    plan: Plan
    loaded: LoadResult | None
    vocab_size: int
    fingerprint: str
    costs: StepCosts


@dataclass(frozen=True)
class LaunchedSchedule:
    """Results of a launched schedule that the device may still compute."""

    worker: Worker
    steps: list[LaunchedStep]

    def result(self) -> Results:
        """Wait for the steps and return their results."""
        return self.worker.collect(self.steps)


class InProcessExecutor:
    """Executor with one worker in the caller's process. See `lockstep.engine.executor.Executor`.

    step_ms: (rows, drafts) -> ms of a step of null rows, measured at warm-up.
    """

    def __init__(self, config: EngineConfig, progress: Progress, hooks: CheckHooks) -> None:
        self.config = config
        startup = WorkerStartup(config, progress, hooks)
        self.checkpoint = startup.checkpoint
        self.loaded = startup.loaded
        self.plan = startup.plan(self._fit_memory([startup]))
        self.worker, self.step_ms = startup.start(self.plan, progress)
        self._choices = startup.build.choices
        self._notes = startup.notes
        self._costs = StepCosts.of(
            startup.model, startup.draft, passes_of(config.speculative_config)
        )

    def _fit_memory(self, ranks: list[WorkerStartup]) -> MemoryFit:
        """Measure every rank's memory once -> the smallest fit. Raises CapacityError."""
        return smallest_fit([rank.fit_memory() for rank in ranks], self.config)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return self.worker.table.sampling.bias.shape[1]

    @property
    def facts(self) -> Facts:
        """Facts about the engine that this executor belongs to."""
        return Facts(
            self.config,
            self.plan,
            self.loaded,
            self.vocab_size,
            self.plan.fingerprint,
            self._costs,
        )

    def execute(self, schedule: Schedule, fill_masks: FillMasks) -> LaunchedSchedule:
        """Launch a schedule. fill_masks: answers the mask queries of its rows."""
        return LaunchedSchedule(self.worker, self.worker.launch(schedule, fill_masks))

    def probe(self) -> None:
        """Run an empty step and wait for it. Raises what it raises."""
        self.worker.probe()

    def device_rates(self) -> Rates | None:
        """Measure how fast the device moves bytes; None where it has no memory left for that."""
        return rates_of(self.plan.device)

    def explain(self) -> dict[str, Any]:
        """Return the backend choices per layer, and notes about the checkpoint's weight format."""
        return {
            "layers": [vars(choice) for choice in self._choices],
            "notes": list(self._notes),
        }


class HasExecutor(Protocol):
    """An engine."""

    @property
    def executor(self) -> object: ...


def executor_of(engine: HasExecutor) -> InProcessExecutor:
    """Return an engine's executor, which must run in this process: for checks and tests."""
    assert isinstance(engine.executor, InProcessExecutor)
    return engine.executor


def worker_of(engine: HasExecutor) -> Worker:
    """Return the worker of an engine whose executor runs in this process."""
    return executor_of(engine).worker
