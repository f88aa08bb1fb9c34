"""How a command is ended from outside in good order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In here the first SIGTERM raises KeyboardInterrupt, as Ctrl-C does, and others do nothing.

    In another thread than the main one nothing is changed: signals are handled there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from lockstep.kernels.compiler_signals import settle_signals

    settle_signals()
    usual = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _ignore)  # timeout sends it to the process and to its group
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing. SIG_IGN would write a warning where a signal is under way."""
