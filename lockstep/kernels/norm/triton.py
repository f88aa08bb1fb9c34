"""rms_norm and gated_rms_norm in Triton: one program per row.

The lanes that sum a row are a function of its width alone: no argument is specialised on alignment
or size, so one binary serves every batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.norm import gated_rms_norm, rms_norm

WIDEST = 16384


@triton.jit
def _normalised(x, eps, D: tl.constexpr):
    x = x.to(tl.float32)
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + eps))


@triton.jit(
    do_not_specialize=["inner", "outer_stride", "inner_stride", "eps", "offset"],
    do_not_specialize_on_alignment=["x", "weight", "out"],
)
def _rms_norm_kernel(
    x, weight, out, inner, outer_stride, inner_stride, eps, offset,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x += row // inner * outer_stride + row % inner * inner_stride
    values = _normalised(tl.load(x + lanes, mask=lanes < D, other=0.0), eps, D)
    scale = offset + tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + lanes, (values * scale).to(out.dtype.element_ty), mask=lanes < D)


@triton.jit(
    do_not_specialize=["inner", "outer_stride", "inner_stride", "gate_outer", "gate_inner", "eps"],
    do_not_specialize_on_alignment=["x", "gate", "weight", "out"],
)
def _gated_rms_norm_kernel(
    x, gate, weight, out, inner, outer_stride, inner_stride, gate_outer, gate_inner, eps,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x += row // inner * outer_stride + row % inner * inner_stride
    gate += row // inner * gate_outer + row % inner * gate_inner
    values = _normalised(tl.load(x + lanes, mask=lanes < D, other=0.0), eps, D)
    scale = tl.load(weight + lanes, mask=lanes < D, other=0.0).to(tl.float32)
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


def _lanes(width: int) -> dict[str, Any]:
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
        lanes = _lanes(x.shape[-1])
        _rms_norm_kernel[grid](rows, weight, out, inner, *strides, eps, offset, **lanes)
    return out


@gated_rms_norm.backend("triton", supports=_supports)
def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_rms_norm."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, inner, *strides = _rows(x)
    gates, _, *gate_strides = _rows(gate)
    if x.numel():
        grid = (rows.shape[0] * inner,)
        _gated_rms_norm_kernel[grid](
            rows, gates, weight, out, inner, *strides, *gate_strides, eps, **_lanes(x.shape[-1])
        )
    return out
