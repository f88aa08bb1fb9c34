# mypy: ignore-errors
"""Ring slots in Triton: see lockstep.kernels.recurrent.history."""

import triton
import triton.language as tl


@triton.jit
def wrapped(slot, ring_slots):
    """A ring slot that may lie up to one ring before or behind the ring, put into it."""
    slot = tl.where(slot < 0, slot + ring_slots, slot)
    return tl.where(slot >= ring_slots, slot - ring_slots, slot)


@triton.jit
def next_folded(start, folded, flush, state_grid):
    """The `folded` that a generated step leaves behind: see lockstep.kernels.recurrent.history."""
    last = start // state_grid * state_grid
    return tl.where((start - folded >= flush) & (last > folded), last, folded)


@triton.jit
def next_slot(slot, ring_slots):
    """The ring slot of the next token."""
    return tl.where(slot + 1 == ring_slots, 0, slot + 1)
