"""Processes that are forked from a server with all imports, which take seconds in a new process."""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED_MODULE = "tests.forked_imports"


@cache
def fork_context() -> ForkServerContext:
    """Return a context of forked processes in which the interpreter has not replaced the kernels,
    as it may have in this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED_MODULE])
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        forkserver.ensure_running()
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
    return context
