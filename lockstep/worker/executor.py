"""Executor: the first rank's worker in the calling process, the other ranks in their own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lockstep.config import EngineConfig, Plan
from lockstep.kernels.exchange import exchange
from lockstep.kernels.selection import Replacement
from lockstep.models.loader import LoadResult
from lockstep.progress import Progress
from lockstep.scheduling.grammar import FillMasks, MaskQuery
from lockstep.scheduling.schedule import Results, Schedule
from lockstep.spec import passes_of
from lockstep.worker.device_rates import Rates, rates_of
from lockstep.worker.explain_ranks import explain_ranks
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_process import Call, Collect, Execute, Masks, read_masks
from lockstep.worker.ranks import NoPeerRanks, PeerRanks, start_ranks
from lockstep.worker.roofline import StepCosts
from lockstep.worker.row_table_audit import compare_ranks
from lockstep.worker.startup import WorkerStartup, smallest_fit
from lockstep.worker.worker import LaunchedStep, Worker

T = TypeVar("T")
AUDIT_EVERY = 16
"""Schedules between two comparisons of the ranks' row tables, with the setting `audit`."""


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
    replacements: tuple[Replacement, ...] = ()


@dataclass(frozen=True)
class LaunchedSchedule:
    """Results of a launched schedule that the device may still compute. number: of the schedule."""

    worker: Worker
    steps: list[LaunchedStep]
    peers: PeerRanks | NoPeerRanks
    number: int

    def result(self) -> Results:
        """Wait for the steps and return their results. Raises RankError."""
        try:
            if any(row.hidden is not None for step in self.steps for row in step.rows):
                self.peers.send(Collect(self.number))
            return self.worker.collect(self.steps)
        except RuntimeError as error:
            raise self.peers.cause(error) from error


class InProcessExecutor:
    """Executor with the first rank in the caller's process: see lockstep.engine.executor.

    The other ranks, if tensor_parallel_size asks for any, are processes that get every schedule.

    step_ms: (rows, drafts) -> ms of a step of null rows, measured at warm-up.
    """

    def __init__(self, config: EngineConfig, progress: Progress, hooks: CheckHooks) -> None:
        self.config = config
        self._num_schedules = 0
        self._audits = config.audit > 0 and config.tensor_parallel_size > 1
        self.peers = start_ranks(config, hooks, progress)
        try:
            startup = WorkerStartup(config, progress, hooks, self.peers.group)
            fits = [startup.fit_memory(), *self.peers.fits()]
            self.plan = startup.plan(smallest_fit(fits, config))
            self.peers.start(self.plan)
            self.worker, self.step_ms = startup.start(self.plan, progress)
            self.peers.wait_ready()
        except RuntimeError as error:
            cause = self.peers.cause(error)
            self.peers.close(str(cause))
            raise cause from error
        except BaseException as error:
            self.peers.close(str(error))
            raise
        self._fits = fits
        self.checkpoint = startup.checkpoint
        self.loaded = startup.loaded
        self._choices = startup.build.choices
        self._notes = startup.notes
        self._replacements = tuple(startup.build.replacements)
        self._costs = StepCosts.of(
            startup.model, startup.draft, passes_of(config.speculative_config)
        )

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
            self._replacements,
        )

    def execute(self, schedule: Schedule, fill_masks: FillMasks) -> LaunchedSchedule:
        """Launch a schedule. fill_masks: answers the mask queries of its rows."""
        self._num_schedules += 1
        self.peers.send(Execute(self._num_schedules, schedule))
        with self._step():
            steps = self.worker.launch(schedule, self._broadcasting(fill_masks))
        if self._audits and self._num_schedules % AUDIT_EVERY == 0:
            self.collective_rpc(compare_ranks)
        return LaunchedSchedule(self.worker, steps, self.peers, self._num_schedules)

    def _broadcasting(self, fill_masks: FillMasks) -> FillMasks:
        """Return a fill_masks that sends its answers to the other ranks too."""

        def fill(queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
            free = fill_masks(queries, memory)
            self.peers.send(Masks(read_masks(queries, memory), free))
            return free

        return fill

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Abandon the peers if a step of this rank raises."""
        try:
            yield
        except RuntimeError as error:
            raise self.peers.cause(error) from error
        except BaseException as error:
            self.peers.abandon(f"a step of the first rank ended by {type(error).__name__}")
            raise

    def probe(self) -> None:
        """Run an empty step and wait for it. Raises the step's error."""
        self.collective_rpc(Worker.probe)

    def collective_rpc(self, function: Callable[[Worker], T]) -> T:
        """Call a function with the worker of every rank; return what it returns on the first one.

        function: one that can be pickled.
        """
        self.peers.send(Call(function))
        with self._step():
            return function(self.worker)

    def call_on_failure(self, function: Callable[[str], None] | None) -> None:
        """See Executor."""
        self.peers.call_on_failure(function)

    def close(self) -> None:
        """See Executor."""
        self.peers.close()

    def device_rates(self) -> Rates | None:
        """Measure how fast the device moves bytes; None where it has no memory left for that."""
        return rates_of(self.plan.device)

    def explain(self) -> dict[str, Any]:
        """Return the backend choices per layer, bytes, exchanges and floors of the ranks, and notes
        about the checkpoint's weight format.
        """
        ranks = [fit.rank_bytes(self.plan) for fit in self._fits]
        backends = {choice.backend for choice in self._choices if choice.op == exchange.name}
        return {
            "layers": [vars(choice) for choice in self._choices],
            "ranks": explain_ranks(ranks, self._costs, self.plan, ", ".join(backends)),
            "notes": [*self._notes, *map(str, self._replacements)],
        }


class HasExecutor(Protocol):
    """Engine that owns an executor."""

    @property
    def executor(self) -> object: ...


def executor_of(engine: HasExecutor) -> InProcessExecutor:
    """Return an engine's executor, which must run in this process: for checks and tests."""
    assert isinstance(engine.executor, InProcessExecutor)
    return engine.executor


def worker_of(engine: HasExecutor) -> Worker:
    """Return the worker of an engine whose executor runs in this process."""
    return executor_of(engine).worker
