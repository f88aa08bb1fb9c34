# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Compilation of CPU kernels, once per user and machine: their machine code is kept on disk."""

from numba import njit
from numba.core.compiler_lock import global_compiler_lock

from lockstep.kernels.simd.disk_cache import MachineCodeCache, cache_folder

OPTIONS = dict(nogil=True, error_model="numpy", boundscheck=False)
"""Options of every kernel. fastmath stays off: it would reorder sums."""


def inline(function):
    """Compile a function that kernels call. It becomes a part of their machine code.

    It has no entries for callers in Python and C. Without those of its functions, linear_f32 takes
    3.0 s of CPU time to compile, and 3.8 s with them.
    """
    return njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)


@inline
def keep_alive(array):
    """Keep an array's memory until this call.

    Numba frees an array after its last use, and loads and stores by its address are no uses.
    """
    return array.size


class KernelTable(dict):
    """Kernels by the dtypes that they load and store."""

    def __missing__(self, dtypes):
        raise ValueError(f"no Numba kernel loads {dtypes}; there are kernels of {list(self)}")


def kernel(function):
    """Compile a function of numbers and addresses at its first call, and keep it on disk.

    Where no folder is writable, each process compiles anew.
    """
    compiled = njit(function, **OPTIONS)
    if cache_folder() is None:
        return compiled
    compiled._cache = files = MachineCodeCache(function)
    compile_or_load = compiled.compile

    def compile_and_unlock(signature):
        # Numba's lock of threads, which the same thread may take again, is taken before the lock of
        # processes, which it holds. In the other order two threads could wait for each other where
        # a kernel calls another one and compiles it meanwhile.
        with global_compiler_lock:
            try:
                return compile_or_load(signature)
            finally:
                files.unlock()

    compiled.compile = compile_and_unlock
    return compiled
