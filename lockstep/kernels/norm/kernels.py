# mypy: ignore-errors
"""All norms in Triton: one program per row, or some narrow rows.

The tree that sums a row is written out (row_sum), so that it is a function of the width alone:
neither the compiler's layouts, nor alignment, nor what else a kernel reads can change a bit.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.reductions import inverse_rms, row_sum, row_sums, spread
from lockstep.kernels.device.tree_reduction import load_tree_sum


@triton.jit
def _normalised(x, eps, D: tl.constexpr):
    x = x.to(tl.float32)
    return x * inverse_rms(row_sum(x * x), eps, D)


@triton.jit
def rms_norm_kernel(
    x, weight, out, inner, outer_stride, inner_stride, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    x += row // inner * outer_stride + row % inner * inner_stride
    values = _normalised(tl.load(x + lanes, mask=lanes < D, other=0.0), eps, D)
    tl.store(out + row * D + lanes, (values * scale).to(out.dtype.element_ty), mask=lanes < D)


@triton.jit
def add_rms_norm_kernel(
    x, parts, weight, total, out, inner, x_outer, x_inner, part, part_outer, part_inner, eps,
    offset, PARTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x + the rounded sum of PARTS tensors `part` numbers apart, and its norm."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    x += row // inner * x_outer + row % inner * x_inner
    parts += row // inner * part_outer + row % inner * part_inner
    added = tl.load(x + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    delta = load_tree_sum(parts, lanes, part, lanes < D, PARTS).to(total.dtype.element_ty)
    added = (added + delta.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + row * D + lanes, added, mask=lanes < D)
    values = _normalised(added, eps, D) * scale
    tl.store(out + row * D + lanes, values.to(out.dtype.element_ty), mask=lanes < D)


@triton.jit
def _values_and_gate(
    x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program's ROWS of `rows` rows: numbers [ROWS, 1], lanes, which are live, place within a
    token, and x and gate in fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    lanes = spread(ROWS, BLOCK)
    live = (row < rows) & (lanes < D)
    outer = (row // inner).to(tl.int64)
    place = row % inner
    x += outer * outer_stride + place * inner_stride
    gate += outer * gate_outer + place * gate_inner
    values = tl.load(x + lanes, mask=live, other=0.0).to(tl.float32)
    z = tl.load(gate + lanes, mask=live, other=0.0).to(tl.float32)
    return row, lanes, live, place, values, z


@triton.jit
def gated_rms_norm_kernel(
    x, gate, weight, out, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of `rows` rows."""
    row, lanes, live, place, values, z = _values_and_gate(
        x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, D, BLOCK, ROWS
    )
    scale = tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    values = values * inverse_rms(row_sums(values * values), eps, D)[:, None]
    values = values * scale * silu_approx(z)
    out += row.to(tl.int64) * D
    tl.store(out + lanes, values.to(out.dtype.element_ty), mask=live)


@triton.jit
def gated_group_norm_kernel(
    x, gate, weight, out, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of `rows` rows; a row of D is one of `inner` groups of a token."""
    row, lanes, live, place, values, z = _values_and_gate(
        x, gate, rows, inner, outer_stride, inner_stride, gate_outer, gate_inner, D, BLOCK, ROWS
    )
    scale = tl.load(weight + place * D + lanes, mask=live, other=0.0).to(tl.float32)
    values = values * silu_approx(z)
    values = values * inverse_rms(row_sums(values * values), eps, D)[:, None] * scale
    out += row.to(tl.int64) * D
    tl.store(out + lanes, values.to(out.dtype.element_ty), mask=live)
