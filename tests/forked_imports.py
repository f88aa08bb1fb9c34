"""Imports that forked processes share: Torch, Triton, the ops, the engine, the server, doctor, and
Triton's hash over its own files, which is part of its cache keys."""
# ruff: noqa: E402

import gc
import os

# Before Triton is imported: the interpreter has not replaced the kernels of forked processes, as it
# may have in the process that started the fork server.
os.environ.pop("TRITON_INTERPRET", None)
gc.disable()  # it would look at the imported objects again and again

import lockstep.cli.serve
import lockstep.doctor.preload
import lockstep.serve.engine_factory
import lockstep.serve.server
import lockstep.worker.rank_process  # noqa: F401
from lockstep.kernels.backends import load

try:
    from triton.runtime.cache import triton_key
except ImportError:
    pass
else:
    triton_key()
load()
# Forked processes share the pages of these objects as long as no collection writes to them.
gc.freeze()
gc.enable()
