"""Imports that all compiling processes share: Torch, Triton, the ops, and Triton's hash over its
own files, which is part of its cache keys."""

from triton.runtime.cache import triton_key

from lockstep.kernels.backends import load

load()
triton_key()
