# mypy: ignore-errors
"""Compilation of CPU kernels, once per machine: Numba keeps the machine code on disk."""

from functools import cache
from pathlib import Path

from numba import njit

OPTIONS = dict(nogil=True, error_model="numpy", boundscheck=False)
"""Options of every kernel. fastmath stays off: it would reorder sums."""
INLINED = ("simd/*.py", "*/numba_kernels.py", "gated_delta_rule/reference.py")
"""Files of lockstep.kernels whose functions and constants kernels inline: the last for L2_EPS."""


def inline(function):
    """Compile a function that kernels call. It becomes a part of their machine code."""
    return njit(function, **OPTIONS)


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
    return compiled


@cache
def _inlined_stamp():
    """Return the names, times and sizes of the files that kernels may inline."""
    kernels = Path(__file__).parents[1]
    files = sorted(file for pattern in INLINED for file in kernels.glob(pattern))
    return tuple((str(f.relative_to(kernels)), f.stat().st_mtime, f.stat().st_size) for f in files)
