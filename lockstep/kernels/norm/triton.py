"""rms_norm, add_rms_norm and gated_rms_norm in Triton: one program per row.

The lanes that sum a row are a function of its width alone: no argument is specialised on alignment
or size, so one binary serves every batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.norm import add_rms_norm, gated_rms_norm, rms_norm

WIDEST = 16384


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr):
    """1 / rms of x [BLOCK] fp32, which is 0 past its D lanes."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps)


@triton.jit
def _normalised(x, eps, D: tl.constexpr):
    x = x.to(tl.float32)
    return x * inverse_rms(x, eps, D)


@triton.jit(
    do_not_specialize=["inner", "outer_stride", "inner_stride", "eps", "offset"],
    do_not_specialize_on_alignment=["x", "weight", "out"],
)
def _rms_norm_kernel(
    x, weight, out, inner, outer_stride, inner_stride, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    x += row // inner * outer_stride + row % inner * inner_stride
    values = _normalised(tl.load(x + lanes, mask=lanes < D, other=0.0), eps, D)
    tl.store(out + row * D + lanes, (values * scale).to(out.dtype.element_ty), mask=lanes < D)


@triton.jit(
    do_not_specialize=[
        "inner", "x_outer", "x_inner", "delta_outer", "delta_inner", "eps", "offset",
    ],
    do_not_specialize_on_alignment=["x", "delta", "weight", "total", "out"],
)  # fmt: skip
def _add_rms_norm_kernel(
    x, delta, weight, total, out, inner, x_outer, x_inner, delta_outer, delta_inner, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    x += row // inner * x_outer + row % inner * x_inner
    delta += row // inner * delta_outer + row % inner * delta_inner
    added = tl.load(x + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    added += tl.load(delta + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    added = added.to(total.dtype.element_ty)
    tl.store(total + row * D + lanes, added, mask=lanes < D)
    values = _normalised(added, eps, D) * scale
    tl.store(out + row * D + lanes, values.to(out.dtype.element_ty), mask=lanes < D)


@triton.jit(
    do_not_specialize=["inner", "outer_stride", "inner_stride", "gate_outer", "gate_inner", "eps"],
    do_not_specialize_on_alignment=["x", "gate", "weight", "out"],
)
def _gated_rms_norm_kernel(
    x, gate, weight, out, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scale = tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    x += row // inner * outer_stride + row % inner * inner_stride
    gate += row // inner * gate_outer + row % inner * gate_inner
    values = _normalised(tl.load(x + lanes, mask=lanes < D, other=0.0), eps, D)
    z = tl.load(gate + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    values = values * scale * (z / (1.0 + tl.exp(-z)))
    tl.store(out + row * D + lanes, values.to(out.dtype.element_ty), mask=lanes < D)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [..., D] as [outer, inner, D] without a copy where strides allow: (x, inner, strides)."""
    if x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    if x.stride(2) != 1:
        x = x.contiguous()
    return x, x.shape[1], x.stride(0), x.stride(1)


def row_layout(width: int) -> dict[str, Any]:
    """The launch options that fix which lane holds which of `width` numbers."""
    block = triton.next_power_of_2(width)
    warps = max(1, min(8, block // 256))
    return dict(D=width, BLOCK=block, num_warps=warps, enable_fp_fusion=False)


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
    """See lockstep.kernels.norm.add_rms_norm."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, inner, *strides = _rows(x)
    deltas, _, *delta_strides = _rows(delta)
    if x.numel():
        grid = (rows.shape[0] * inner,)
        _add_rms_norm_kernel[grid](
            rows, deltas, weight, total, out, inner, *strides, *delta_strides, eps, offset,
            **row_layout(x.shape[-1]),
        )  # fmt: skip
    return total, out


@gated_rms_norm.backend("triton", supports=_supports)
def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_rms_norm."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, inner, *strides = _rows(x)
    gates, _, *gate_strides = _rows(gate)
    if x.numel():
        grid = (rows.shape[0] * inner,)
        _gated_rms_norm_kernel[grid](
            rows,
            gates,
            weight,
            out,
            inner,
            *strides,
            *gate_strides,
            eps,
            **row_layout(x.shape[-1]),
        )
    return out
