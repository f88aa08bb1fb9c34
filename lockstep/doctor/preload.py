"""Imports of an examination's process, done once: the fork server imports this module."""

import gc

import torch

from lockstep.doctor import examine
from lockstep.kernels.backends import load, uses_numba

__all__ = ["examine"]
load()
if uses_numba(torch.float32):
    from numba.core.registry import cpu_target

    # The first call of a Numba kernel in each process would do this, in 0.12 s.
    cpu_target.target_context.refresh()
# Collections of a forked process would read, and so copy, the memory of all imports.
gc.collect()
gc.freeze()
