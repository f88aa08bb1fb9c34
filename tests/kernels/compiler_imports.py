"""What the processes that compile kernels have in common, made once: Torch, Triton, the ops, and
the hash over Triton's own files, of which it makes the names of what it keeps."""

from triton.runtime.cache import triton_key

from lockstep.kernels.backends import load

load()
triton_key()
