"""Engines that are made in a process of their own, by functions that can be pickled."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine
from lockstep.engine.engine import Engine
from lockstep.engine.engine_process import HEARTBEAT_SECONDS
from lockstep.engine.stats import Stats
from lockstep.errors import ConfigError, EngineDeadError
from lockstep.kernels.compiler_signals import run_empty_pass
from lockstep.serve.engine_factory import served_engine
from lockstep.text.settings import TextSettings

PATIENCE = 90.0
Progress = Callable[[str, int, int], None]
Made = tuple[Engine, Callable[[Any], Any]]


def plain(settings: dict[str, Any], progress: Progress) -> Made:
    """An engine as users have it."""
    return served_engine(EngineConfig.read(**settings), TextSettings(), "text", progress)


def compiling(settings: dict[str, Any], progress: Progress) -> Made:
    """An engine for which kernels were compiled."""
    run_empty_pass()
    return plain(settings, progress)


def faulty(settings: dict[str, Any], progress: Progress) -> Made:
    """An engine whose step sleeps where a request is named "hang...", and that ends by itself where
    one is named "die..."."""
    made = plain(settings, progress)
    engine = made[0]
    step = engine.step

    def call() -> Any:
        names = list(engine.scheduler.entries)
        if any(name.startswith("hang") for name in names):
            time.sleep(3600)
        if any(name.startswith("die") for name in names):
            raise RuntimeError("the device is gone")
        return step()

    def recover() -> Any:
        raise EngineDeadError("the device is gone")

    engine.step = call  # type: ignore[method-assign]
    engine.recover = recover  # type: ignore[method-assign]
    return made


def refusing(settings: dict[str, Any], progress: Progress) -> Made:
    """No engine: its settings are wrong."""
    progress("loading", 1, 2)
    raise ConfigError("dtype='x' is not allowed")


class Signalled:
    """`refusing`, but the process that unpickles it gets the signals of a group first."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signalled, ()

    def __call__(self, settings: dict[str, Any], progress: Progress) -> Made:
        return refusing(settings, progress)


def signalled() -> Callable[[dict[str, Any], Progress], Made]:
    """Before a line of ours runs in the process."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return refusing


def breaking(settings: dict[str, Any], progress: Progress) -> Made:
    """No engine: something was not foreseen."""
    raise ZeroDivisionError("one by none")


def exiting(settings: dict[str, Any], progress: Progress) -> Made:
    """No engine, and no word."""
    os._exit(7)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine; one that hangs fails."""
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    """Returns once it holds; fails after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain {what}"
        time.sleep(0.005)


def wait_until_empty(client: AsyncEngine) -> Stats:
    """Returns once no request is open and the engine holds nothing of any: its stats then."""
    time.sleep(2 * HEARTBEAT_SECONDS)  # a process tells its stats at pulses only
    deadline = time.monotonic() + PATIENCE
    while True:
        stats = client.stats()
        held = (stats.num_running, stats.num_waiting, stats.num_swapped, stats.pages_used)
        if not client.num_open and held == (0, 0, 0, 0):
            return stats
        assert time.monotonic() < deadline, f"left: {client.num_open} open, {held}"
        time.sleep(0.005)
