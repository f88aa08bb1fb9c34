"""Imports that forked processes share: Torch, Triton, the ops, the engine, the server, doctor, and
Triton's hash over its own files, which is part of its cache keys.

They also share what the first engine of a process prepares, such as machine code. Each one saves
0.2 s of CPU time by that.
"""
# ruff: noqa: E402

import gc
import os

import torch

# Before Triton is imported: the interpreter has not replaced the kernels of forked processes, as it
# may have in the process that started the fork server.
os.environ.pop("TRITON_INTERPRET", None)
gc.disable()  # it would look at the imported objects again and again

import lockstep.cli.serve
import lockstep.doctor.preload
import lockstep.serve.engine_factory
import lockstep.serve.server
import lockstep.worker.rank_process  # noqa: F401
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.kernels.backends import load

try:
    from triton.runtime.cache import triton_key
except ImportError:
    pass
else:
    triton_key()
load()
# Only the thread that forks exists in a forked process: torch must not start others here.
num_threads = torch.get_num_threads()
torch.set_num_threads(1)
build_engine(EngineConfig.read(max_model_len=512, max_num_seqs=4, device="cpu"))
torch.set_num_threads(num_threads)
gc.collect()
# Forked processes share the pages of these objects as long as no collection writes to them.
gc.freeze()
gc.enable()
