"""How a command is ended from outside in good order."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In here the first SIGTERM raises KeyboardInterrupt, as Ctrl-C does, and others do nothing.

    In another thread than the main one nothing is changed: signals are handled there alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _settle_compiler()
    usual = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _settle_compiler() -> None:
    """Lets Triton's compiler take SIGINT and SIGTERM now, and takes SIGINT back.

    LLVM does it once, with a process's first pass, by a handler for one signal: a second one that
    comes before Python's is back ends the process without a word.
    """
    if find_spec("triton") is None:
        return
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    ir.pass_manager(context).run(ir.builder(context).create_module(), "empty")
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, _ignore)  # timeout sends it to the process and to its group
    raise KeyboardInterrupt


def _ignore(number: int, frame: FrameType | None) -> None:
    """Nothing. SIG_IGN would write a warning where a signal is under way."""
