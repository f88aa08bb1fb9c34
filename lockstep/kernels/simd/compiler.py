# mypy: ignore-errors
"""Compilation of CPU kernels, once per machine: Numba keeps the machine code on disk."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from numba import njit

OPTIONS = dict(nogil=True, error_model="numpy", boundscheck=False)
"""Options of every kernel. fastmath stays off: it would reorder sums."""
INLINED = ("simd/*.py", "*/numba_kernels.py", "gated_delta_rule/reference.py")
"""Files of lockstep.kernels whose functions and constants kernels inline: the last for L2_EPS."""


def inline(function):
    """Compile a function that kernels call. It becomes a part of their machine code.

    It has no entries for callers in Python and C. Without those of its functions, linear_f32 takes
    3.0 s of CPU time to compile, and 3.8 s with them.
    """
    return njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)


def kernel(function):
    """Compile a function of numbers and addresses at its first call, and keep it on disk.

    Where neither the package's folder nor the user's cache folder is writable, each process
    compiles anew.
    """
    try:
        compiled = njit(function, cache=True, **OPTIONS)
    except RuntimeError:
        return njit(function, **OPTIONS)
    # Numba recompiles where a kernel's own file changed, and knows nothing of files whose functions
    # and constants are a part of the machine code.
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _inlined_stamp())
    # Ranks start side by side: one of them compiles, and the others load what it kept. Numba itself
    # takes no lock: kernels of one factory share an index, and two processes that add to it at the
    # same time may give one file name to two kernels.
    compile_or_load = compiled.compile

    def compile_alone(signature):
        with _lock(Path(cache_file._index_path).with_suffix(".lock")):
            return compile_or_load(signature)

    compiled.compile = compile_alone
    return compiled


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; none in a read-only folder or a file system without locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            # Closing is not enough: a process that was forked meanwhile has the file open too.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


@cache
def _inlined_stamp():
    """Return the names, times and sizes of the files that kernels may inline."""
    kernels = Path(__file__).parents[1]
    files = sorted(file for pattern in INLINED for file in kernels.glob(pattern))
    return tuple((str(f.relative_to(kernels)), f.stat().st_mtime, f.stat().st_size) for f in files)
