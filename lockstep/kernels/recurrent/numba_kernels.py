# mypy: ignore-errors
"""Numba functions of recurrent layers' histories."""

from lockstep.kernels.simd.compiler import inline


@inline
def next_folded(start, folded, flush, grid):
    """Compute lockstep.kernels.recurrent.history.next_folded of one row."""
    last = start // grid * grid
    return last if start - folded >= flush and last > folded else folded
