"""Factories of engines for the engine's process: functions that can be pickled."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.engine import Engine
from lockstep.engine.engine_process import HEARTBEAT_SECONDS
from lockstep.engine.executor import PendingResults
from lockstep.engine.stats import Stats
from lockstep.errors import ConfigError, EngineDeadError
from lockstep.kernels.compiler_signals import run_empty_pass
from lockstep.progress import Progress
from lockstep.scheduling.grammar import FillMasks
from lockstep.scheduling.schedule import Schedule
from lockstep.serve.engine_factory import engine_factory
from lockstep.serve.telemetry.logs import LogFormat
from lockstep.text.settings import TextSettings
from tests.forked_processes import name_after_parent

PATIENCE = 90.0
EngineAndGrammars = tuple[Engine, Callable[[Any], Any]]


def plain(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Return an engine as users have it."""
    return engine_factory(EngineConfig.read(**settings), TextSettings(), "text", progress)


def compiling(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Return an engine after Triton has compiled something, as for new kernels."""
    run_empty_pass()
    return plain(settings, progress)


def faulty(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Return an engine that hangs while it runs requests named "hang...", and crashes once it has
    one named "die..."."""
    engine_and_grammars = plain(settings, progress)
    engine = engine_and_grammars[0]
    step = engine.step

    def call() -> Any:
        if any(entry.request.id.startswith("hang") for entry in engine.scheduler.running):
            time.sleep(3600)
        if any(name.startswith("die") for name in engine.scheduler.entries):
            raise RuntimeError("the device is gone")
        return step()

    def recover() -> Any:
        raise EngineDeadError("the device is gone")

    engine.step = call  # type: ignore[method-assign]
    engine.recover = recover  # type: ignore[method-assign]
    return engine_and_grammars


def dies_in_audits(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Return an engine whose process ends in the first step of an audit."""
    engine_and_grammars = plain(settings, progress)
    engine = engine_and_grammars[0]
    step = engine.step

    def call() -> Any:
        result = step()
        if engine.scheduler.is_auditing:
            os._exit(7)
        return result

    engine.step = call  # type: ignore[method-assign]
    return engine_and_grammars


def fails_on_signals(
    config: EngineConfig, text: TextSettings, log_format: LogFormat, progress: Progress
) -> EngineAndGrammars:
    """Return an engine a step of which raises after SIGUSR1, and hangs after SIGUSR2.

    After SIGHUP, a kernel of the step reads out of bounds: CUDA refuses all later work of the
    process.
    """
    name_after_parent()
    engine_and_grammars = engine_factory(config, text, log_format, progress)
    executor = engine_and_grammars[0].executor
    execute = executor.execute
    received: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))

    def call(schedule: Schedule, fill_masks: FillMasks) -> PendingResults:
        if received and schedule.has_steps:
            number = received.pop()
            if number == signal.SIGUSR2:
                time.sleep(3600)
            if number == signal.SIGUSR1:
                raise RuntimeError("a step failed")
            cause_cuda_fault()
        return execute(schedule, fill_masks)

    executor.execute = call  # type: ignore[method-assign]
    return engine_and_grammars


def cause_cuda_fault() -> None:
    """Launch a kernel whose index is out of bounds; the error appears at a later call of CUDA."""
    torch.zeros(1, device="cuda")[torch.full((1,), 1 << 40, device="cuda")]


def refusing(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Raise ConfigError, as for invalid settings."""
    progress("loading", 1, 2)
    raise ConfigError("dtype='x' is not allowed")


class Signalled:
    """Factory like `refusing`; unpickling it sends the signals of a process group first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signalled, ()

    def __call__(self, settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
        return refusing(settings, progress)


def signalled() -> Callable[[dict[str, Any], Progress], EngineAndGrammars]:
    """Send the signals before the process runs any code of the package."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return refusing


def breaking(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """Raise an unexpected error."""
    raise ZeroDivisionError("one by none")


def exiting(settings: dict[str, Any], progress: Progress) -> EngineAndGrammars:
    """End the process without a message."""
    os._exit(7)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine; raise TimeoutError after PATIENCE seconds."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def wait_until_empty(client: AsyncEngine) -> Stats:
    """Wait until the engine has no request and no used page, and return its stats."""
    time.sleep(2 * HEARTBEAT_SECONDS)  # the process sends its stats with heartbeats only
    deadline = time.monotonic() + PATIENCE
    while True:
        stats = client.stats()
        usage = (stats.num_running, stats.num_waiting, stats.num_swapped, stats.pages_used)
        if not client.num_open and usage == (0, 0, 0, 0):
            return stats
        assert time.monotonic() < deadline, f"left: {client.num_open} open, {usage}"
        time.sleep(0.005)
