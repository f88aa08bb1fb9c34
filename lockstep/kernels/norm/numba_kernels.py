# mypy: ignore-errors
"""Numba kernels of the norms: the sum of squares of a row in 16 lanes, added as a binary tree."""

import math

from lockstep.kernels.simd.compiler import KernelTable, inline, kernel
from lockstep.kernels.simd.functions import silu
from lockstep.kernels.simd.vectors import (
    F32,
    FLOATS,
    LANES,
    fma,
    splat,
    sum_lanes,
    vload_part,
    vstore_part,
    zeros,
)

ONE = F32(1.0)


@inline
def inverse_rms(squares, width, eps):
    """Return 1 / sqrt(mean + eps) of a row's sums of squares by lane."""
    mean = sum_lanes(squares) / F32(width)
    return splat(ONE / F32(math.sqrt(mean + F32(eps))))


@inline
def norm_row(x_dtype, dtype, x, weight, out, width, eps, offset):
    """Norm one row: out = x / rms(x) * (offset + weight). x and out may be one row."""
    squares = zeros()
    for i in range(0, width, LANES):
        value = vload_part(x_dtype, x, i, width)
        squares = fma(value, value, squares)
    factor = inverse_rms(squares, width, eps)
    shift = splat(F32(offset))
    for i in range(0, width, LANES):
        scale = vload_part(dtype, weight, i, width) + shift
        normed = vload_part(x_dtype, x, i, width) * factor * scale
        vstore_part(dtype, out, i, width, normed)


@inline
def gated_norm_row(dtype, x, gate, weight, out, width, eps):
    """Norm and gate one row: out = x / rms(x) * weight * silu(gate). x is fp32."""
    squares = zeros()
    for i in range(0, width, LANES):
        value = vload_part(F32, x, i, width)
        squares = fma(value, value, squares)
    factor = inverse_rms(squares, width, eps)
    for i in range(0, width, LANES):
        normed = vload_part(F32, x, i, width) * factor
        normed = normed * vload_part(dtype, weight, i, width)
        normed = normed * silu(vload_part(dtype, gate, i, width))
        vstore_part(dtype, out, i, width, normed)


def _make_norms(dtype, size):
    """Return the kernels of one dtype: (rms_norm, add_rms_norm).

    Rows of x may be strided: row r is at r // inner * outer_stride + r % inner * stride.
    """

    @kernel
    def rms_norm(x, weight, out, rows, inner, outer_stride, stride, width, eps, offset):
        for r in range(rows):
            row = x + (r // inner * outer_stride + r % inner * stride) * size
            norm_row(dtype, dtype, row, weight, out + r * width * size, width, eps, offset)

    @kernel
    def add_rms_norm(x, delta, weight, total, out, rows, delta_stride, width, eps, offset):
        for r in range(rows):
            row_offset = r * width * size
            delta_row = delta + r * delta_stride * size
            for i in range(0, width, LANES):
                value = vload_part(dtype, x + row_offset, i, width)
                value = value + vload_part(dtype, delta_row, i, width)
                vstore_part(dtype, total + row_offset, i, width, value)
            norm_row(dtype, dtype, total + row_offset, weight, out + row_offset, width, eps, offset)

    return rms_norm, add_rms_norm


def _make_gated_norms(dtype, size):
    """Return the kernels of one dtype: (gated_rms_norm, gated_group_norm).

    Rows of gate may be strided: see _make_norms. x [..., D] fp32 is contiguous.
    """

    @kernel
    def gated_rms_norm(x, gate, weight, out, rows, inner, outer_stride, stride, width, eps):
        for r in range(rows):
            gate_row = gate + (r // inner * outer_stride + r % inner * stride) * size
            out_row = out + r * width * size
            gated_norm_row(dtype, x + r * width * 4, gate_row, weight, out_row, width, eps)

    @kernel
    def gated_group_norm(
        x, gate, weight, out, rows, inner, outer_stride, stride, width, eps, groups
    ):
        for r in range(rows):
            row = x + r * width * 4
            gate_row = gate + (r // inner * outer_stride + r % inner * stride) * size
            squares = zeros()
            for i in range(0, width, LANES):
                value = vload_part(F32, row, i, width)
                value = value * silu(vload_part(dtype, gate_row, i, width))
                squares = fma(value, value, squares)
            factor = inverse_rms(squares, width, eps)
            group = weight + r % groups * width * size
            for i in range(0, width, LANES):
                value = vload_part(F32, row, i, width)
                value = value * silu(vload_part(dtype, gate_row, i, width))
                normed = value * factor * vload_part(dtype, group, i, width)
                vstore_part(dtype, out + r * width * size, i, width, normed)

    return gated_rms_norm, gated_group_norm


def _by_name(*kernels):
    return {compiled.__name__: compiled for compiled in kernels}


KERNELS = KernelTable(
    (
        dtype,
        _by_name(*_make_norms(loaded, dtype.itemsize), *_make_gated_norms(loaded, dtype.itemsize)),
    )
    for dtype, loaded in FLOATS.items()
)
"""Dtype -> op -> kernel."""
