"""What the processes that compile kernels have in common, imported once: Torch, Triton, the ops, and
the hash over Triton's own files, which is part of the names under which it keeps what it compiles."""

from triton.runtime.cache import triton_key

from lockstep.kernels.backends import load

load()
triton_key()
