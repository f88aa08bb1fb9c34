# mypy: ignore-errors
"""Compilation of CPU kernels, once per machine: Numba keeps the machine code on disk."""

from functools import cache
from pathlib import Path

from numba import njit

OPTIONS = dict(nogil=True, error_model="numpy", boundscheck=False)
"""Options of every kernel. fastmath stays off: it would reorder sums."""


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
    # Numba recompiles where a kernel's own file changed, and knows nothing of this package's files.
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, _package_stamp())
    return compiled


@cache
def _package_stamp():
    """Return the names, times and sizes of this package's files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((f.name, f.stat().st_mtime, f.stat().st_size) for f in files)
