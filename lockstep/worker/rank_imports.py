"""Imports of a rank's process, done once: the fork server imports this module.

Nothing here may initialize CUDA: a forked process could not use it any more.
"""

from lockstep.kernels.backends import load
from lockstep.worker import rank_process

__all__ = ["rank_process"]

try:
    from triton.runtime.cache import triton_key
except ImportError:
    pass
else:
    triton_key()  # a hash over Triton's files, which is part of each kernel's cache key
load()
