# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""silu_mul and relu2 on a CPU by Numba kernels, with exp from IEEE operations."""

import torch

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.backends import numba_trait
from lockstep.kernels.simd.compiler import KernelTable, kernel
from lockstep.kernels.simd.functions import silu
from lockstep.kernels.simd.strides import row_strides
from lockstep.kernels.simd.vectors import (
    F32,
    FLOATS,
    LANES,
    rounded,
    splat,
    vload_part,
    vmax,
    vstore_part,
)


def _make_kernels(dtype, size):
    """Return the kernels of one dtype: (silu_mul, relu2)."""

    @kernel
    def silu_mul_kernel(gate_up, out, rows, stride, width):
        for r in range(rows):
            gate = gate_up + r * stride * size
            up = gate + width * size
            out_row = out + r * width * size
            for i in range(0, width, LANES):
                gated = rounded(dtype, silu(vload_part(dtype, gate, i, width)))
                vstore_part(dtype, out_row, i, width, gated * vload_part(dtype, up, i, width))

    @kernel
    def relu2_kernel(x, out, rows, stride, width):
        for r in range(rows):
            for i in range(0, width, LANES):
                # vmax keeps a NaN of its first argument, as torch.relu does.
                value = vmax(vload_part(dtype, x + r * stride * size, i, width), splat(F32(0.0)))
                vstore_part(dtype, out + r * width * size, i, width, value * value)

    return silu_mul_kernel, relu2_kernel


KERNELS = KernelTable(
    (dtype, _make_kernels(loaded, dtype.itemsize)) for dtype, loaded in FLOATS.items()
)


@silu_mul.backend("numba", supports=numba_trait)
def silu_mul_numba(gate_up):
    """See lockstep.kernels.activations.silu_mul."""
    return _run(0, gate_up, gate_up.shape[1] // 2)


@relu2.backend("numba", supports=numba_trait)
def relu2_numba(x):
    """See lockstep.kernels.activations.relu2."""
    return _run(1, x, x.shape[1])


def _run(index, x, width):
    """Run a kernel on the rows of x, which give `width` outputs each."""
    if x.dim() != 2:
        raise ValueError(f"x: the kernel reads rows [T, C]; the tensor is {list(x.shape)}")
    x, rows, _, stride, _ = row_strides(x)
    out = torch.empty(rows, width, dtype=x.dtype)
    KERNELS[x.dtype][index](x.data_ptr(), out.data_ptr(), rows, stride, width)
    return out
