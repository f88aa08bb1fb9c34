# mypy: ignore-errors
"""Norms in Triton: a CTA per row, or per group of narrow rows.

Sums use row_sum and row_sums of device/reductions.py, whose tree depends on the row's width alone.
Neither the compiler's layouts, nor alignment, nor the rest of a kernel can change a bit.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.reductions import inverse_rms, row_sum, row_sums, spread
from lockstep.kernels.device.tree_reduction import load_tree_sum


@triton.jit
def _normalize(x, eps, D: tl.constexpr):
    """Compute x / rms(x) of one row in fp32."""
    x = x.to(tl.float32)
    return x * inverse_rms(row_sum(x * x), eps, D)


@triton.jit
def rms_norm_kernel(
    x, weight, out, inner, outer_stride, inner_stride, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm one row: x / rms(x) * (offset + weight)."""
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + offs, mask=offs < D, other=0.0).to(tl.float32)
    x += row // inner * outer_stride + row % inner * inner_stride
    values = _normalize(tl.load(x + offs, mask=offs < D, other=0.0), eps, D)
    tl.store(out + row * D + offs, (values * scale).to(out.dtype.element_ty), mask=offs < D)


@triton.jit
def store_sum(x, delta, scale, total, offs, eps, D: tl.constexpr):
    """Store the rounded sum of one row of x, fp32, and of delta; return its norm times scale."""
    added = (x + delta.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + offs, added, mask=offs < D)
    # The norm reads the rounded sum: that is what the next layer's residual is.
    return (_normalize(added, eps, D) * scale).to(total.dtype.element_ty)


@triton.jit
def store_sum_and_norm(x, delta, scale, total, out, offs, eps, D: tl.constexpr):
    """Store the rounded sum of one row of x, fp32, and of delta, and the sum's norm times scale."""
    norm = store_sum(x, delta, scale, total, offs, eps, D)
    tl.store(out + offs, norm, mask=offs < D)


@triton.jit
def add_and_norm(
    x, parts, weight, total, row, offs, inner, x_outer, x_inner, part, part_outer, part_inner, eps,
    offset, PARTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store the sum of delta and one row of x; return its norm, rounded once, at columns offs.

    delta: the rounded tree sum of PARTS split-K partials, `part` elements apart.
    """
    scale = offset + tl.load(weight + offs, mask=offs < D, other=0.0).to(tl.float32)
    x += row // inner * x_outer + row % inner * x_inner
    parts += row // inner * part_outer + row % inner * part_inner
    added = tl.load(x + offs, mask=offs < D, other=0.0).to(tl.float32)
    # Rounded to the residual's dtype before the addition, as two separate ops would.
    delta = load_tree_sum(parts, offs, part, offs < D, PARTS).to(total.dtype.element_ty)
    return store_sum(added, delta, scale, total + row * D, offs, eps, D)


@triton.jit
def add_rms_norm_kernel(
    x, parts, weight, total, out, inner, x_outer, x_inner, part, part_outer, part_inner, eps,
    offset, PARTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add delta to one row of x and norm the sum. See add_and_norm."""
    pdl_start()
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    norm = add_and_norm(
        x, parts, weight, total, row, offs, inner, x_outer, x_inner, part, part_outer, part_inner,
        eps, offset, PARTS, D,
    )  # fmt: skip
    tl.store(out + row * D + offs, norm, mask=offs < D)


@triton.jit
def _values_and_gate(
    x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load x and gate of ROWS of `rows` rows in fp32.

    Returns row ids [ROWS, 1], column offsets, mask, index of the row in its token, x and gate.
    """
    # Rows [outer, inner] need not be contiguous: both strides are arguments, so views of a fused
    # projection are read without a copy.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    offs = spread(ROWS, BLOCK)
    mask = (row < rows) & (offs < D)
    outer = (row // inner).to(tl.int64)
    inner_index = row % inner
    x += outer * outer_stride + inner_index * inner_stride
    gate += outer * gate_outer + inner_index * gate_inner
    values = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + offs, mask=mask, other=0.0).to(tl.float32)
    return row, offs, mask, inner_index, values, z


@triton.jit
def gated_rms_norm_kernel(
    x, gate, weight, out, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norm ROWS of `rows` rows: x / rms(x) * weight * silu(gate)."""
    pdl_start()
    row, offs, mask, inner_index, values, z = _values_and_gate(
        x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, D, BLOCK, ROWS
    )
    # Loaded for every row, from L1: a vector [1, D] would be exchanged through shared memory.
    scale = tl.load(weight + offs, mask=offs < D, other=0.0).to(tl.float32)
    values = values * inverse_rms(row_sums(values * values), eps, D)[:, None]
    values = values * scale * silu_approx(z)
    out += row.to(tl.int64) * D
    tl.store(out + offs, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_group_norm_kernel(
    x, gate, weight, out, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norm ROWS of `rows` rows, each one of `inner` groups of a token: y / rms(y) * weight.

    y = x * silu(gate).
    """
    pdl_start()
    row, offs, mask, inner_index, values, z = _values_and_gate(
        x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, D, BLOCK, ROWS
    )
    # Weights differ by group.
    scale = tl.load(weight + inner_index * D + offs, mask=mask, other=0.0).to(tl.float32)
    values = values * silu_approx(z)
    values = values * inverse_rms(row_sums(values * values), eps, D)[:, None] * scale
    out += row.to(tl.int64) * D
    tl.store(out + offs, values.to(out.dtype.element_ty), mask=mask)
