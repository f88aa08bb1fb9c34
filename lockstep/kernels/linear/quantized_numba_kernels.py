# mypy: ignore-errors
"""Numba kernels of linear with 4-bit and 8-bit codes: they are dequantized to fp32 in registers.

A weight is stored as in numba_kernels.py, with words in place of values: [N / TILE, W, TILE], and
with scales and offsets [N / TILE, G, 2, TILE] fp32. Words are those of
kernels/formats/weights/word_order.py, in ascending order of columns: the four words of 32 columns
(4 bits) or 16 columns (8 bits) are neighbours, and a kernel reads a tile from front to back. The
chains are those of numba_kernels.py over the dequantized values, so the bits are too.

One row multiplies each value as soon as it is dequantized. Several rows share a tile that is
dequantized into memory: 74 KB of 576 columns, which stay in the CPU's second cache.
"""

import numpy as np

from lockstep.kernels.linear.numba_kernels import TILE, _rows_of_tile, _store
from lockstep.kernels.simd.compiler import inline, kernel
from lockstep.kernels.simd.vectors import (
    F32,
    LANES,
    fma,
    load,
    splat,
    vload,
    vload_codes,
    vstore,
    zeros,
)

QUADS = 4
"""Neighbouring words, of which each has every fourth pair of columns."""


@inline
def _value(bits, minima, words, word, shift, scale, offset):
    """Dequantize one column of 16 outputs. offset: with minima, the minimum times -1."""
    code = vload_codes(words, word, shift, bits)
    if minima:
        # The product is exact, so an fma rounds like the subtraction.
        return fma(scale, code, offset)
    return (code - offset) * scale


@inline
def _addresses(bits, k, group, words, scales):
    """Return the addresses of the first word and of the scales of the columns from k on."""
    word = k // (128 // bits) * QUADS
    return words + word * TILE * 4, scales + k // group * 2 * TILE * 4


@inline
def _load_scales(scales):
    """Return the scales and the offsets of a group: both halves of the tile's outputs."""
    scale0 = vload(F32, scales, 0)
    scale1 = vload(F32, scales, LANES)
    offset0 = vload(F32, scales, TILE)
    offset1 = vload(F32, scales, TILE + LANES)
    return scale0, scale1, offset0, offset1


@inline
def _column(bits, minima, bit, index, words, group_scales):
    """Dequantize column `index` of eight, for both halves of the tile's outputs.

    words: address of the first of their words. bit: their first bit in a word. group_scales: see
    _load_scales.
    """
    scale0, scale1, offset0, offset1 = group_scales
    word = index // 2 * TILE
    shift = 16 * (index % 2) + bit
    w0 = _value(bits, minima, words, word, shift, scale0, offset0)
    w1 = _value(bits, minima, words, word + LANES, shift, scale1, offset1)
    return w0, w1


@inline
def _add_eight(bits, minima, bit, x, words, scales, acc0, acc1):
    """Add eight columns of one row to the sums.

    x, words, scales: addresses of what belongs to the first of them. bit: its first bit in a word.
    """
    group_scales = _load_scales(scales)
    for index in range(2 * QUADS):
        w0, w1 = _column(bits, minima, bit, index, words, group_scales)
        value = splat(load(F32, x, index))
        acc0 = fma(value, w0, acc0)
        acc1 = fma(value, w1, acc1)
    return acc0, acc1


@inline
def _one_row(bits, minima, x, words, scales, group, out, k_size, columns):
    """Compute the tile's outputs of one row."""
    acc0 = zeros()
    acc1 = zeros()
    for k in range(0, k_size, 16):
        w, s = _addresses(bits, k, group, words, scales)
        x_k = x + k * 4
        if bits == 8 or k % 32 == 0:
            acc0, acc1 = _add_eight(bits, minima, 0, x_k, w, s, acc0, acc1)
            acc0, acc1 = _add_eight(bits, minima, bits, x_k + 32, w, s, acc0, acc1)
        else:
            acc0, acc1 = _add_eight(bits, minima, 2 * bits, x_k, w, s, acc0, acc1)
            acc0, acc1 = _add_eight(bits, minima, 3 * bits, x_k + 32, w, s, acc0, acc1)
    _store(F32, out, 0, columns, acc0)
    _store(F32, out, LANES, columns - LANES, acc1)


@inline
def _dequantize_eight(bits, minima, bit, words, scales, target):
    """Write the values of eight columns to `target` [8, TILE] fp32. See _add_eight."""
    group_scales = _load_scales(scales)
    for index in range(2 * QUADS):
        w0, w1 = _column(bits, minima, bit, index, words, group_scales)
        vstore(F32, target, index * TILE, w0)
        vstore(F32, target, index * TILE + LANES, w1)


@inline
def _dequantize_tile(bits, minima, words, scales, group, target, k_size):
    """Write the values of a tile to `target` [K, TILE] fp32."""
    for k in range(0, k_size, 16):
        w, s = _addresses(bits, k, group, words, scales)
        first = target + k * TILE * 4
        second = first + 8 * TILE * 4
        if bits == 8 or k % 32 == 0:
            _dequantize_eight(bits, minima, 0, w, s, first)
            _dequantize_eight(bits, minima, bits, w, s, second)
        else:
            _dequantize_eight(bits, minima, 2 * bits, w, s, first)
            _dequantize_eight(bits, minima, 3 * bits, w, s, second)


@inline
def _tiles(bits, minima, x, words, scales, group, out, rows, n, k_size, stride, begin, end):
    """Compute the tiles begin .. end of all rows. Arguments: see make_kernel."""
    dequantized = np.empty(k_size * TILE if rows > 1 else 0, np.float32)
    w_size = (k_size + 127) // 128 * QUADS * bits * TILE * 4
    s_size = (k_size + group - 1) // group * 2 * TILE * 4
    for tile in range(begin, end):
        w = words + tile * w_size
        s = scales + tile * s_size
        out_tile = out + tile * TILE * 4
        columns = n - tile * TILE
        if rows == 1:
            _one_row(bits, minima, x, w, s, group, out_tile, k_size, columns)
        elif rows > 1:
            values = dequantized.ctypes.data
            _dequantize_tile(bits, minima, w, s, group, values, k_size)
            _rows_of_tile(F32, F32, 4, 4, x, values, out_tile, rows, k_size, stride, columns)


def make_kernel(bits, minima):
    """Return the kernel of codes of `bits` bits, with or without minima.

    Its arguments: addresses of x [rows, K] fp32 contiguous, of words [tiles, W, TILE] and of scales
    and offsets [tiles, G, 2, TILE] fp32; columns of a group; the address of out [rows, N] fp32;
    rows, N, K, elements from one row of out to the next, and the range of tiles to compute.
    """

    @kernel
    def linear_codes(x, words, scales, group, out, rows, n, k_size, stride, begin, end):
        _tiles(bits, minima, x, words, scales, group, out, rows, n, k_size, stride, begin, end)

    return linear_codes
