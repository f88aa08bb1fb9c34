"""Signal handlers of Triton's compiler.

LLVM installs its own handlers of SIGINT and SIGTERM with a process's first compiler pass. Each of
them serves one signal and then calls the handler that it replaced. Until then a second signal has
the default action, which ends the process without a message.
"""

import signal
from importlib.util import find_spec

LLVM_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals for which LLVM installs handlers."""


def reclaim_signal_handlers() -> None:
    """Make the compiler install its handlers now, then restore ours for the process's lifetime.

    Call it from the main thread, before a handler of these signals is installed or a signal is
    ignored.
    """
    if find_spec("triton") is None:
        return
    handlers = {number: signal.getsignal(number) for number in LLVM_SIGNALS}
    run_empty_pass()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_empty_pass() -> None:
    """Run the smallest possible compiler pass: that on an empty module."""
    # Triton has no public function that starts LLVM, so this uses its private bindings.
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    ir.pass_manager(context).run(ir.builder(context).create_module(), "empty")
