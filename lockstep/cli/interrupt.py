"""How a command is ended from outside in good order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Status of a command that Ctrl-C ended, as shells count it."""


@contextmanager
def interrupted_imports() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of an ImportError that Ctrl-C has caused.

    Modules such as numpy's turn an interrupt of their import into an ImportError, or swallow it and
    cannot be imported a second time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except ImportError as error:
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, usual)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In here the first SIGTERM raises KeyboardInterrupt, as Ctrl-C does, and others do nothing.

    In another thread than the main one nothing is changed: signals are handled there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from lockstep.kernels.compiler_signals import reclaim_signal_handlers

    reclaim_signal_handlers()
    usual = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def end_at_next_interrupt() -> None:
    """Let another Ctrl-C end the process at once, without a traceback, while it ends anyway."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _ignore)  # timeout sends it to the process and to its group
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing. SIG_IGN would write a warning where a signal is under way."""
