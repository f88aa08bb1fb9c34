"""Interruption of a command by Ctrl-C or SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""


@contextmanager
def interrupted_imports() -> Iterator[None]:
    """Raise KeyboardInterrupt instead of an ImportError that Ctrl-C has caused.

    Some modules, such as numpy, turn an interrupt of their import into an ImportError, or swallow
    it and cannot be imported again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except ImportError as error:
        # Only an import that Ctrl-C broke; other ImportErrors are real.
        if interrupts:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first SIGTERM in the context, and ignore later ones.

    Outside of the main thread nothing changes, since only the main thread handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from lockstep.kernels.compiler_signals import reclaim_signal_handlers

    # LLVM would replace the handler at Triton's first compilation.
    reclaim_signal_handlers()
    previous_handler = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def end_at_next_interrupt() -> None:
    """Make another Ctrl-C end the process at once, without a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _ignore)  # `timeout` sends SIGTERM to the process and to its group
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. SIG_IGN would print a warning if a signal is pending."""
