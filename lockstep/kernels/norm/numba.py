"""The norms on a CPU by Numba kernels: one call per op."""

from math import prod

import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.norm.numba_kernels import KERNELS
from lockstep.kernels.simd.strides import address, address_of_rows, row_strides


@rms_norm.backend("numba", supports=numba_trait)
def rms_norm_numba(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See lockstep.kernels.norm.rms_norm."""
    width = x.shape[-1]
    x, *layout = row_strides(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    KERNELS[x.dtype]["rms_norm"](
        x.data_ptr(), address("weight", weight, x.dtype, width), out.data_ptr(), *layout, width,
        eps, offset,
    )  # fmt: skip
    return out


@add_rms_norm.backend("numba", supports=numba_trait)
def add_rms_norm_numba(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.norm.add_rms_norm."""
    if delta.dim() > x.dim():
        delta = tree_sum(delta).to(x.dtype)
    width = x.shape[-1]
    x = x.contiguous()
    if delta.dim() != 2 or delta.stride(1) != 1:
        delta = delta.contiguous().view(-1, width)
    total, out = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // width
    delta_address, delta_stride = address_of_rows("delta", delta, x.dtype, rows, width)
    KERNELS[x.dtype]["add_rms_norm"](
        x.data_ptr(), delta_address, address("weight", weight, x.dtype, width), total.data_ptr(),
        out.data_ptr(), rows, delta_stride, width, eps, offset,
    )  # fmt: skip
    return total, out


@gated_rms_norm.backend("numba", supports=numba_trait)
def gated_rms_norm_numba(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_rms_norm."""
    return _gated("gated_rms_norm", x, gate, weight, eps)


@gated_group_norm.backend("numba", supports=numba_trait)
def gated_group_norm_numba(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See lockstep.kernels.norm.gated_group_norm."""
    return _gated("gated_group_norm", x, gate, weight.contiguous(), eps, gate.shape[-2])


def _gated(name: str, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *groups: int) -> Tensor:
    """Run a gated norm of x [..., D] fp32. groups: number of them, if each has a weight."""
    width = gate.shape[-1]
    gate, *layout = row_strides(gate)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    x = x.contiguous()
    KERNELS[gate.dtype][name](
        address("x", x, torch.float32, gate.numel()), gate.data_ptr(),
        address("weight", weight, gate.dtype, width * prod(groups)), out.data_ptr(),
        *layout, width, eps, *groups,
    )  # fmt: skip
    return out
