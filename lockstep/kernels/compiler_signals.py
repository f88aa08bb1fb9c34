"""Triton's compiler and the signals of its process.

LLVM takes SIGINT and SIGTERM once, with a process's first pass, each by a handler for one signal
that calls the one before it. A second signal that comes before that one is back has the default
action: it ends the process without a word.
"""

import signal
from importlib.util import find_spec

TAKEN = (signal.SIGINT, signal.SIGTERM)


def settle_signals() -> None:
    """Lets the compiler take its signals now, and gives them back for good; from the main thread.

    Whoever handles one, or ignores it, calls this before.
    """
    if find_spec("triton") is None:
        return
    handlers = {number: signal.getsignal(number) for number in TAKEN}
    run_empty_pass()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_empty_pass() -> None:
    """The least that the compiler can do. Triton has no public way to it."""
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    ir.pass_manager(context).run(ir.builder(context).create_module(), "empty")
