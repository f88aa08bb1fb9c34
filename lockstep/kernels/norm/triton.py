"""Launchers of the norms in Triton."""

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.architecture import WARP_SIZE
from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.device.reductions import WARPS
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.norm.kernels import (
    add_rms_norm_kernel,
    gated_group_norm_kernel,
    gated_rms_norm_kernel,
    rms_norm_kernel,
)

MAX_WIDTH = 16384
"""Maximum width of a row: one CTA norms it."""
THREAD_ELEMENTS = 8
"""Elements per thread: a load of 16 bytes for 16-bit elements."""
CTA_ELEMENTS = 1024
"""Elements of narrow rows per CTA.

An H200 starts at most 1.6 CTAs per ns, so one CTA per narrow row would be limited by that rate
(times in docs/kernels/norm.md).
"""


def row_view(x: Tensor) -> tuple[Tensor, int, int, int]:
    """View x [..., D] as [outer, inner, D], copying only if the last stride is not 1.

    Returns the view, inner, and the strides of both dimensions.
    """
    if x.dim() != 3:
        x = x.reshape(-1, 1, x.shape[-1])
    if x.stride(2) != 1:
        x = x.contiguous()
    return x, x.shape[1], x.stride(0), x.stride(1)


def row_layout(width: int, rows: int = 1) -> dict[str, Any]:
    """Return the launch options of a CTA with `rows` rows of `width`. They change no bit."""
    block = next_power_of_2(width)
    warps = max(1, min(WARPS.value, rows * block // THREAD_ELEMENTS // WARP_SIZE))
    return dict(D=width, BLOCK=block, num_warps=warps, enable_fp_fusion=False)


def rows_per_cta(width: int) -> int:
    """Return the rows per CTA of the gated norms."""
    return max(1, CTA_ELEMENTS // next_power_of_2(width))


def norm_trait(**traits: Any) -> str | None:
    """Return None if one CTA can norm rows of this width, else the reason why not."""
    width = traits.get("width", 1)
    return f"width {width} is above {MAX_WIDTH}" if width > MAX_WIDTH else gpu_trait(**traits)


@rms_norm.backend("triton", supports=norm_trait)
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Run one CTA per row: see lockstep.kernels.norm.rms_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, inner, *strides = row_view(x)
    if x.numel():
        grid = (rows.shape[0] * inner,)
        layout = row_layout(x.shape[-1])
        rms_norm_kernel[grid](rows, weight, out, inner, *strides, eps, offset, **layout)
    return out


@add_rms_norm.backend("triton", supports=norm_trait)
def add_rms_norm_triton(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Run one CTA per row: see lockstep.kernels.norm.add_rms_norm. Partials are contiguous."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, inner, *strides = row_view(x)
    parts = delta if delta.dim() > x.dim() else delta[None]
    first, _, *part_strides = row_view(parts[0])
    if x.numel():
        grid = (rows.shape[0] * inner,)
        add_rms_norm_kernel[grid](
            rows, first, weight, total, out, inner, *strides, parts.stride(0), *part_strides,
            eps, offset, parts.shape[0], **row_layout(x.shape[-1]),
        )  # fmt: skip
    return total, out


@gated_rms_norm.backend("triton", supports=norm_trait)
def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run a few rows per CTA: see lockstep.kernels.norm.gated_rms_norm."""
    return _launch_gated(gated_rms_norm_kernel, x, gate, weight, eps)


@gated_group_norm.backend("triton", supports=norm_trait)
def gated_group_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run a few rows per CTA: see norm.gated_group_norm. x, gate [T, G, D]; weight contiguous."""
    return _launch_gated(gated_group_norm_kernel, x, gate, weight, eps)


def _launch_gated(kernel: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch a kernel of the gated norms with a few rows per CTA."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, inner, *strides = row_view(x)
    gates, _, *gate_strides = row_view(gate)
    if x.numel():
        count = rows.shape[0] * inner
        cta_rows = rows_per_cta(x.shape[-1])
        kernel[(ceil_div(count, cta_rows),)](
            rows, gates, weight, out, count, inner, *strides, *gate_strides, eps,
            ROWS=cta_rows, **row_layout(x.shape[-1], cta_rows),
        )  # fmt: skip
    return out
