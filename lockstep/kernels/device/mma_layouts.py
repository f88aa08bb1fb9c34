# mypy: ignore-errors
"""Register layouts of one warp's mma.sync (m16n8k16) operands, in Gluon.

Columns of a head are multiplied in groups of 16 (the K of one instruction). Within a group the
order of the columns changes no bit on sm_90. A thread may therefore hold four neighbouring columns:
position s of a group contains column 4 (s % 8 // 2) + 2 (s // 8) + s % 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.dequantize import split_16bit

# One warp: accumulators of 16 x 8 per instruction.
MMA_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT_OPERAND = gl.constexpr(gl.DotOperandLayout(0, MMA_LAYOUT.value, 2))
RIGHT_OPERAND = gl.constexpr(gl.DotOperandLayout(1, MMA_LAYOUT.value, 2))


@gluon.constexpr_function
def log2(n):
    """Return the exponent of a power of two."""
    return n.bit_length() - 1


@gluon.constexpr_function
def layout_bases(rank, *steps):
    """Return the bases of a linear layout from (dimension, step) pairs."""
    return [[step if i == dimension else 0 for i in range(rank)] for (dimension, step) in steps]


@gluon.jit
def column_of(position):
    """Return the column that a position of a [.., D] operand contains."""
    return position // 16 * 16 + position % 8 // 2 * 4 + position % 16 // 8 * 2 + position % 2


@gluon.jit
def join_pairs(p0, p1):
    """Join two words of bf16 pairs [...] into [..., 2, 2], the pair last."""
    l0, h0 = split_16bit(p0, gl.bfloat16)
    l1, h1 = split_16bit(p1, gl.bfloat16)
    return gl.join(gl.join(l0, h0), gl.join(l1, h1))
