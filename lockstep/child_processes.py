"""Ends and signals of child processes: only the first process of a group reacts to signals."""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize

IGNORED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that terminals and supervisors send to a whole process group."""
PR_SET_PDEATHSIG = 1
"""Number of the option in linux/prctl.h."""


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals in child processes that start in the context.

    A child unblocks them by ignore_signals().
    """
    resource_tracker.ensure_running()  # multiprocessing would start it later, and unblock them then
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def on_end(owner: object, function: Callable[[], object]) -> Finalize:
    """Call a function once, when its owner is collected or this process exits.

    multiprocessing waits for child processes at exit. Functions of weakref.finalize may be called
    after that wait, which child processes that ignore signals would never end.
    """
    return Finalize(owner, function, exitpriority=0)


def end_with_parent() -> None:
    """Make Linux kill this process when the thread that started it ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_signals() -> None:
    """Ignore the signals in this process."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
