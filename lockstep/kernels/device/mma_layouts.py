# mypy: ignore-errors
"""Where one warp holds the operands of mma.sync (m16n8k16), in Gluon.

Columns of a head are taken in groups of 16, as everywhere. Within a group the tensor core of sm_90
adds in any order to the same bits, so that a thread's numbers may be four neighbours: place s of a
group holds column 4 (s % 8 // 2) + 2 (s // 8) + s % 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.dequantize import split_16bit

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))


@gluon.constexpr_function
def log2(n):
    """Of a power of two."""
    return n.bit_length() - 1


@gluon.constexpr_function
def bases(rank, *steps):
    """Bases of a layout: (dimension, step) each."""
    return [[step if i == dimension else 0 for i in range(rank)] for (dimension, step) in steps]


@gluon.jit
def column_of(place):
    """The column that stands at a place of [.., D] operands."""
    return place // 16 * 16 + place % 8 // 2 * 4 + place % 16 // 8 * 2 + place % 2


@gluon.jit
def four_of(p0, p1):
    """Two pairs of bf16 [...] -> [..., 2, 2], the pair last."""
    l0, h0 = split_16bit(p0, gl.bfloat16)
    l1, h1 = split_16bit(p1, gl.bfloat16)
    return gl.join(gl.join(l0, h0), gl.join(l1, h1))
