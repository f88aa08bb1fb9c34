"""Interface between the engine and the workers that run its model."""

from collections.abc import Callable
from typing import Any, Protocol

from lockstep.config import EngineConfig, Plan
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.schedule import Results, Schedule


class PendingResults(Protocol):
    """Results of a launched schedule, read one step late."""

    def result(self) -> Results:
        """Wait for the schedule's steps and return their results."""
        ...


class Executor(Protocol):
    """Executor of a model: one worker in process, or one per rank.

    Every worker receives the same schedules. Schedules and results are plain data. Workers execute
    schedules in the order of the calls. plan: sizes that fit the memory of every rank, made once
    before the first schedule.
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def facts(self) -> Any:
        """Facts about the built engine, as plain data that the engine passes on unread."""
        ...

    def execute(self, schedule: Schedule, fill_masks: FillMasks) -> PendingResults:
        """Launch a schedule without waiting for its results.

        fill_masks: called, before this method returns, with the mask queries of the rows in
        `schedule.masked`.
        """
        ...

    def probe(self) -> None:
        """Run an empty step on every worker and wait for it. Raises what it raises."""
        ...

    def call_on_failure(self, function: Callable[[str], None] | None) -> None:
        """Call a function once with the reason, in any thread, when a worker has ended.

        Steps raise then as well. Without steps nothing else would notice. None: call no function.
        """
        ...

    def close(self) -> None:
        """End the workers of other processes. The executor is not used afterwards."""
        ...

    def device_rates(self) -> Any:
        """Measure how fast the device moves bytes; the engine passes the answer on unread."""
        ...

    def explain(self) -> dict[str, Any]:
        """Return the backend choices per layer, and notes about the checkpoint's weight format."""
        ...
