# mypy: ignore-errors
"""Hadamard rotation in Triton: formats/kv/hadamard.py's additions in the same order.

Each stage is one sum and one difference per number, so no multiply-add can be contracted, and the
bits do not depend on the layout that the compiler chooses.
"""

import triton
import triton.language as tl

INVERSE_SQRT_8 = tl.constexpr(0.35355339059327373)
"""1 / sqrt(8). Those of sqrt(32), sqrt(128) and sqrt(512) are this times a power of two."""
HASH_STEP = tl.constexpr(0x9E3779B1)


@triton.jit
def sign_bits(seed, column):
    """Return the sign bits (int32) of hadamard.random_signs for columns [...] of a head."""
    x = tl.zeros_like(column).to(tl.uint32) + seed.to(tl.uint32)
    x = x + column.to(tl.uint32) * HASH_STEP
    # murmur3's finalizer; the multiplications wrap in 32 bits.
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x & 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def flip_signs(x, mask):
    """Flip the signs of x fp32 where mask has the sign bit."""
    return (x.to(tl.int32, bitcast=True) ^ mask).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(x, STRIDE: tl.constexpr):
    """Apply the unnormalized Hadamard matrix to each x [:, N, :] of x [A, N, B] fp32. STRIDE is 1.

    A stage adds and subtracts elements STRIDE apart, as sums of two that stay in place. The
    reference moves halves instead; both compute the same butterflies.
    """
    N: tl.constexpr = x.shape[1]
    if STRIDE == N:
        return x
    else:
        pairs = tl.reshape(x, (x.shape[0], N // (2 * STRIDE), 2, STRIDE * x.shape[2]))
        # The difference is a sum with the second operand negated: exact, like the reference's.
        second = tl.arange(0, 2)[None, None, :, None] == 1
        total = tl.sum(pairs, 2)[:, :, None, :]
        difference = tl.sum(tl.where(second, -pairs, pairs), 2)[:, :, None, :]
        return hadamard(tl.reshape(tl.where(second, difference, total), x.shape), 2 * STRIDE)


@triton.jit
def hadamard_blocks(x, N: tl.constexpr):
    """Apply the unnormalized Hadamard matrix to every N columns of x [rows, columns] fp32."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (ROWS * (COLUMNS // N), N, 1))
    return tl.reshape(hadamard(blocks, 1), (ROWS, COLUMNS))


@triton.jit
def normalize(x, N: tl.constexpr):
    """Divide x by sqrt(N), N in 16 .. 512, by one product with the fp32 inverse of the root."""
    if N == 16:
        return x * 0.25
    elif N == 32:
        return x * (INVERSE_SQRT_8 / 2)
    elif N == 64:
        return x * 0.125
    elif N == 128:
        return x * (INVERSE_SQRT_8 / 4)
    elif N == 256:
        return x * 0.0625
    else:
        return x * (INVERSE_SQRT_8 / 8)


@triton.jit
def rotate(x, seed, N: tl.constexpr):
    """Rotate heads x [rows, D] in fp32: HadamardRotation.rotate."""
    column = tl.broadcast_to(tl.arange(0, x.shape[1])[None], x.shape)
    return normalize(hadamard_blocks(flip_signs(x, sign_bits(seed, column)), N), N)


@triton.jit
def rotate_back(x, seed, column, N: tl.constexpr):
    """Rotate x [columns, rows] fp32 back: HadamardRotation.rotate_back.

    column: indices [columns] of the columns, from a multiple of N on.
    """
    COLUMNS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    blocks = hadamard(tl.reshape(x, (COLUMNS // N, N, ROWS)), 1)
    x = normalize(tl.reshape(blocks, (COLUMNS, ROWS)), N)
    return flip_signs(x, tl.broadcast_to(sign_bits(seed, column)[:, None], x.shape))
