# mypy: ignore-errors
"""Numba kernels of linear: column tiles of a weight times rows, one FMA chain per output.

A weight [N, K] is stored as [N / TILE, K, TILE]: a kernel reads it once, from front to back, and
its vectors run over outputs. The columns of the last tile past N are zeros.

Every output is the chain acc = fma(x[k], w[k], acc) over ascending k, from 0. The number of rows
and columns that one loop computes only decides which chains advance together.
"""

import numpy as np

from lockstep.kernels.simd.compiler import inline, kernel
from lockstep.kernels.simd.vectors import (
    BF16,
    F16,
    F32,
    LANES,
    fma,
    load,
    splat,
    vload,
    vstore,
    vstore_first,
    zeros,
)

TILE = 2 * LANES
"""Outputs of a tile: two vectors."""
WIDEN_ROWS = 12
"""Minimum rows for which a tile of 16-bit weights is widened to fp32 once, for all rows."""


@inline
def _store(dtype, out, index, columns, acc):
    """Store a vector of outputs, of which `columns` are within the weight."""
    if columns >= LANES:
        vstore(dtype, out, index, acc)
    elif columns > 0:
        vstore_first(dtype, out, index, columns, acc)


@inline
def _one_row(w_dtype, dtype, x, w, out, k_size, columns):
    """Compute the tile's outputs of one row."""
    acc0 = zeros()
    acc1 = zeros()
    for k in range(k_size):
        value = splat(load(F32, x, k))
        acc0 = fma(value, vload(w_dtype, w, k * TILE), acc0)
        acc1 = fma(value, vload(w_dtype, w, k * TILE + LANES), acc1)
    _store(dtype, out, 0, columns, acc0)
    _store(dtype, out, LANES, columns - LANES, acc1)


@inline
def _two_rows(w_dtype, dtype, x, w, out, k_size, stride, columns):
    """Compute the tile's outputs of two rows. stride: elements between rows of out."""
    acc00 = zeros()
    acc01 = zeros()
    acc10 = zeros()
    acc11 = zeros()
    for k in range(k_size):
        w0 = vload(w_dtype, w, k * TILE)
        w1 = vload(w_dtype, w, k * TILE + LANES)
        value = splat(load(F32, x, k))
        acc00 = fma(value, w0, acc00)
        acc01 = fma(value, w1, acc01)
        value = splat(load(F32, x, k_size + k))
        acc10 = fma(value, w0, acc10)
        acc11 = fma(value, w1, acc11)
    _store(dtype, out, 0, columns, acc00)
    _store(dtype, out, LANES, columns - LANES, acc01)
    _store(dtype, out, stride, columns, acc10)
    _store(dtype, out, stride + LANES, columns - LANES, acc11)


@inline
def _four_rows(w_dtype, dtype, x, w, out, k_size, stride, columns):
    """Compute 16 outputs of four rows. w: the first of these outputs' weights."""
    acc0 = zeros()
    acc1 = zeros()
    acc2 = zeros()
    acc3 = zeros()
    for k in range(k_size):
        weights = vload(w_dtype, w, k * TILE)
        acc0 = fma(splat(load(F32, x, k)), weights, acc0)
        acc1 = fma(splat(load(F32, x, k_size + k)), weights, acc1)
        acc2 = fma(splat(load(F32, x, 2 * k_size + k)), weights, acc2)
        acc3 = fma(splat(load(F32, x, 3 * k_size + k)), weights, acc3)
    _store(dtype, out, 0, columns, acc0)
    _store(dtype, out, stride, columns, acc1)
    _store(dtype, out, 2 * stride, columns, acc2)
    _store(dtype, out, 3 * stride, columns, acc3)


@inline
def _six_rows(w_dtype, dtype, x, w, out, k_size, stride, columns):
    """Compute 16 outputs of six rows: with AVX2, 12 of 16 registers have sums. See _four_rows."""
    acc0 = zeros()
    acc1 = zeros()
    acc2 = zeros()
    acc3 = zeros()
    acc4 = zeros()
    acc5 = zeros()
    for k in range(k_size):
        weights = vload(w_dtype, w, k * TILE)
        acc0 = fma(splat(load(F32, x, k)), weights, acc0)
        acc1 = fma(splat(load(F32, x, k_size + k)), weights, acc1)
        acc2 = fma(splat(load(F32, x, 2 * k_size + k)), weights, acc2)
        acc3 = fma(splat(load(F32, x, 3 * k_size + k)), weights, acc3)
        acc4 = fma(splat(load(F32, x, 4 * k_size + k)), weights, acc4)
        acc5 = fma(splat(load(F32, x, 5 * k_size + k)), weights, acc5)
    _store(dtype, out, 0, columns, acc0)
    _store(dtype, out, stride, columns, acc1)
    _store(dtype, out, 2 * stride, columns, acc2)
    _store(dtype, out, 3 * stride, columns, acc3)
    _store(dtype, out, 4 * stride, columns, acc4)
    _store(dtype, out, 5 * stride, columns, acc5)


@inline
def _rows_of_tile(w_dtype, dtype, size, w_size, x, w, out, rows, k_size, stride, columns):
    """Compute a tile's outputs of all rows.

    x, w, out: addresses. size, w_size: bytes of an element of out and of w; x has 4. stride:
    elements between rows of out. columns: outputs from the tile's first one to the end of the
    weight.
    """
    row = 0
    # Blocks of six rows, then of four, two and one. Eight remaining rows are two blocks of four.
    while row + 6 <= rows and rows - row != 8:
        x_rows = x + row * k_size * 4
        out_rows = out + row * stride * size
        _six_rows(w_dtype, dtype, x_rows, w, out_rows, k_size, stride, columns)
        if columns > LANES:
            second = w + LANES * w_size
            out_rows += LANES * size
            _six_rows(w_dtype, dtype, x_rows, second, out_rows, k_size, stride, columns - LANES)
        row += 6
    while row + 4 <= rows:
        x_rows = x + row * k_size * 4
        out_rows = out + row * stride * size
        _four_rows(w_dtype, dtype, x_rows, w, out_rows, k_size, stride, columns)
        if columns > LANES:
            second = w + LANES * w_size
            out_rows += LANES * size
            _four_rows(w_dtype, dtype, x_rows, second, out_rows, k_size, stride, columns - LANES)
        row += 4
    if row + 2 <= rows:
        out_rows = out + row * stride * size
        _two_rows(w_dtype, dtype, x + row * k_size * 4, w, out_rows, k_size, stride, columns)
        row += 2
    if row < rows:
        out_rows = out + row * stride * size
        _one_row(w_dtype, dtype, x + row * k_size * 4, w, out_rows, k_size, columns)


@inline
def _widen(dtype, source, target, count):
    """Copy `count` elements, a multiple of 16, to fp32."""
    for index in range(0, count, LANES):
        vstore(F32, target, index, vload(dtype, source, index))


@inline
def _tiles(dtype, size, x, w, out, rows, n, k_size, stride, begin, end):
    """Compute the outputs of tiles begin .. end - 1 for all rows.

    x: address of [rows, K] fp32, contiguous. w: address of the tiles. out: address of [rows, N],
    whose rows are `stride` elements apart. size: bytes of an element of w and out.
    """
    widened = np.empty(k_size * TILE if size == 2 and rows >= WIDEN_ROWS else 0, np.float32)
    for tile in range(begin, end):
        w_tile = w + tile * k_size * TILE * size
        out_tile = out + tile * TILE * size
        columns = n - tile * TILE
        if len(widened):
            address = widened.ctypes.data
            _widen(dtype, w_tile, address, k_size * TILE)
            _rows_of_tile(F32, dtype, size, 4, x, address, out_tile, rows, k_size, stride, columns)
        else:
            _rows_of_tile(
                dtype, dtype, size, size, x, w_tile, out_tile, rows, k_size, stride, columns
            )


@kernel
def linear_f16(x, w, out, rows, n, k_size, stride, begin, end):
    """Compute tiles begin .. end of x W^T in fp16. Arguments: see _tiles; stride: of out's rows."""
    _tiles(F16, 2, x, w, out, rows, n, k_size, stride, begin, end)


@kernel
def linear_bf16(x, w, out, rows, n, k_size, stride, begin, end):
    """Compute tiles begin .. end of x W^T in bf16. See linear_f16."""
    _tiles(BF16, 2, x, w, out, rows, n, k_size, stride, begin, end)


@kernel
def linear_f32(x, w, out, rows, n, k_size, stride, begin, end):
    """Compute tiles begin .. end of x W^T in fp32. See linear_f16."""
    _tiles(F32, 4, x, w, out, rows, n, k_size, stride, begin, end)
