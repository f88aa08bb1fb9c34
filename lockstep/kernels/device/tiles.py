# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Tiles of 64 rows in shared memory, for wgmma kernels in Gluon."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE_ROWS = 64
"""Rows of a tile: the M of a wgmma instruction, and a page of the cache."""
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""128-byte swizzle of 16-bit tiles: wgmma reads operands, and TMA writes them, without bank
conflicts."""
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Vectors in shared memory, one number per row."""


def tile_descriptor(rows: Tensor, columns: int) -> TensorDescriptor:
    """Return the TMA descriptor of rows [N, D] for copies of tiles [64, columns]."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(rows, [TILE_ROWS, columns], layout)


@gluon.jit
def tma_load_tile(source, row, column, tile, full, empty, phase):
    """Copy a tile [64, columns] into its stage once its last reader has released the stage.

    phase: parity of the stage's use. The producer waits for the opposite parity of `empty`, so it
    passes at once in the first round. `full` completes when all bytes have arrived.
    """
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(full, 64 * tile.shape[1] * 2)
    tma.async_copy_global_to_shared(source, [row, column], full, tile)


@gluon.jit
def zero_tail_rows(rows, first_row, live, layout: gl.constexpr):
    """Zero the rows of a slice of a tile whose number in the tile, from first_row on, is `live`
    or more.

    A page past the row's end contains what an earlier request left there, maybe NaN, and 0 * NaN is
    NaN: a weight of zero does not hide it.
    """
    row = first_row + gl.arange(0, rows.shape[0], gl.SliceLayout(1, layout))[:, None]
    values = rows.load(layout)
    rows.store(gl.where(row < live, values, gl.zeros_like(values)))
