# mypy: ignore-errors
"""All norms in Triton: one program per row, or some narrow rows.

The tree that sums a row is written out (row_sum), so that it is a function of the width alone:
neither the compiler's layouts, nor alignment, nor what else a kernel reads can change a bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.activations._device import silu_approx
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.tree_reduction import load_tree_sum
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm

WIDEST = 16384
"""Numbers of a row that one program takes."""
LANES: tl.constexpr = tl.constexpr(2048)
"""Numbers that 8 warps load at once: eight 16-bit ones, a load of 16 bytes, in each thread."""
WARPS: tl.constexpr = tl.constexpr(8)
"""Warps of a wide row. Their sums are read and added by every thread: one barrier in all."""
THREAD_NUMBERS = 8
"""Numbers of a thread: a load of 16 bytes where they have 16 bits."""
NUMBERS_TOGETHER = 1024
"""Numbers of narrow rows in one program. An H200 starts 1.6 programs a ns, and no more: times in
docs/kernels/norm.md."""


@triton.jit
def row_sum(x):
    """x [a power of two] fp32 -> its sum: halves are added down to LANES, then neighbours.

    A thread adds its own loads and its own vector, then lanes, then warps exchange.
    """
    SIZE: tl.constexpr = x.shape[0]
    if SIZE > LANES:
        return row_sum(tl.sum(tl.reshape(x, (2, SIZE // 2)), 0))
    elif SIZE > WARPS:
        return row_sum(tl.sum(tl.reshape(x, (SIZE // 2, 2)), 1))
    elif SIZE > 1:
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        return row_sum(even + odd)
    else:
        return tl.sum(x, 0)


@triton.jit
def row_sums(x):
    """x [rows, a power of two] fp32 -> [rows]: row_sum's tree for every row."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    if SIZE > LANES:
        return row_sums(tl.sum(tl.reshape(x, (ROWS, 2, SIZE // 2)), 1))
    elif SIZE > 1:
        return row_sums(tl.sum(tl.reshape(x, (ROWS, SIZE // 2, 2)), 2))
    else:
        return tl.reshape(x, (ROWS,))


@triton.jit
def inverse_rms(squares, eps, D: tl.constexpr):
    """1 / rms of rows of D numbers, from the sums of their squares."""
    return 1.0 / tl.sqrt_rn(squares / D + eps)


@triton.jit
def spread(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The lanes of every row [ROWS, BLOCK]. What rows share is loaded by each of them so: it comes
    from L1, where a vector [1, BLOCK] would have to change hands in shared memory."""
    return tl.broadcast_to(tl.arange(0, BLOCK)[None], (ROWS, BLOCK))


@triton.jit
def _normalised(x, eps, D: tl.constexpr):
    x = x.to(tl.float32)
    return x * inverse_rms(row_sum(x * x), eps, D)


@triton.jit
def _rms_norm_kernel(
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
def _add_rms_norm_kernel(
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
def _gated_rms_norm_kernel(
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
def _gated_group_norm_kernel(
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


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [..., D] as [outer, inner, D] without a copy where strides allow: (x, inner, strides)."""
    if x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    if x.stride(2) != 1:
        x = x.contiguous()
    return x, x.shape[1], x.stride(0), x.stride(1)


def row_layout(width: int, rows: int = 1) -> dict[str, Any]:
    """The launch options for `rows` rows of `width` numbers; they change no bit."""
    block = triton.next_power_of_2(width)
    warps = max(1, min(WARPS.value, rows * block // THREAD_NUMBERS // 32))
    return dict(D=width, BLOCK=block, num_warps=warps, enable_fp_fusion=False)


def rows_together(width: int) -> int:
    """Rows in a program of the gated norms."""
    return max(1, NUMBERS_TOGETHER // triton.next_power_of_2(width))


def _supports(**traits: Any) -> str | None:
    width = traits.get("width", 1)
    return f"width {width} is above {WIDEST}" if width > WIDEST else gpu_trait(**traits)


@rms_norm.backend("triton", supports=_supports)
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See lockstep.kernels.norm.rms_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, inner, *strides = _rows(x)
    if x.numel():
        grid = (rows.shape[0] * inner,)
        layout = row_layout(x.shape[-1])
        _rms_norm_kernel[grid](rows, weight, out, inner, *strides, eps, offset, **layout)
    return out


@add_rms_norm.backend("triton", supports=_supports)
def add_rms_norm_triton(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.norm.add_rms_norm. Partials are contiguous."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, inner, *strides = _rows(x)
    parts = delta if delta.dim() > x.dim() else delta[None]
    first, _, *part_strides = _rows(parts[0])
    if x.numel():
        grid = (rows.shape[0] * inner,)
        _add_rms_norm_kernel[grid](
            rows, first, weight, total, out, inner, *strides, parts.stride(0), *part_strides,
            eps, offset, parts.shape[0], **row_layout(x.shape[-1]),
        )  # fmt: skip
    return total, out


@gated_rms_norm.backend("triton", supports=_supports)
def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_rms_norm."""
    return _gated(_gated_rms_norm_kernel, x, gate, weight, eps)


@gated_group_norm.backend("triton", supports=_supports)
def gated_group_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_group_norm. x, gate [T, G, D]; weight is contiguous."""
    return _gated(_gated_group_norm_kernel, x, gate, weight, eps)


def _gated(kernel: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What a kernel of gated norms makes, a few rows a program."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, inner, *strides = _rows(x)
    gates, _, *gate_strides = _rows(gate)
    if x.numel():
        count = rows.shape[0] * inner
        together = rows_together(x.shape[-1])
        kernel[(triton.cdiv(count, together),)](
            rows, gates, weight, out, count, inner, *strides, *gate_strides, eps,
            ROWS=together, **row_layout(x.shape[-1], together),
        )  # fmt: skip
    return out
