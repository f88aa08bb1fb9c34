# mypy: ignore-errors
"""_turn.py in Triton: the same additions in the same order, whatever layout the compiler chooses.

A sum and a difference per number and round: nothing that could be contracted.
"""

import triton
import triton.language as tl

ROOT_8 = tl.constexpr(0.35355339059327373)
"""1 / sqrt(8); those of sqrt(32), sqrt(128) and sqrt(512) are this times a power of two."""
STEP = tl.constexpr(0x9E3779B1)


@triton.jit
def flips(seed, d):
    """Places d [...] of a head -> int32 [...]: the sign bits of _turn.signs."""
    x = tl.zeros_like(d).to(tl.uint32) + seed.to(tl.uint32)
    x = x + d.to(tl.uint32) * STEP
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x & 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def flipped(x, flip):
    """x fp32 with its signs changed where flip has the sign bit."""
    return (x.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(x, STEP: tl.constexpr):
    """x [A, N, B] fp32 -> _turn.hadamard of each [:, N, :], where STEP is 1.

    A round adds and subtracts numbers STEP apart, by sums of two that stay where they are: halving
    in place, bit by bit of the place, is what _turn.hadamard does by moving halves.
    """
    N: tl.constexpr = x.shape[1]
    if STEP == N:
        return x
    else:
        pairs = tl.reshape(x, (x.shape[0], N // (2 * STEP), 2, STEP * x.shape[2]))
        second = tl.arange(0, 2)[None, None, :, None] == 1
        total = tl.sum(pairs, 2)[:, :, None, :]
        difference = tl.sum(tl.where(second, -pairs, pairs), 2)[:, :, None, :]
        return hadamard(tl.reshape(tl.where(second, difference, total), x.shape), 2 * STEP)


@triton.jit
def mixed(x, N: tl.constexpr):
    """x [rows, columns] fp32 -> [rows, columns]: hadamard of every N columns."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, (ROWS * (COLUMNS // N), N, 1))
    return tl.reshape(hadamard(blocks, 1), (ROWS, COLUMNS))


@triton.jit
def divided(x, N: tl.constexpr):
    """x over sqrt(N), N in 16 .. 512, by one multiplication with the root's inverse in fp32."""
    if N == 16:
        return x * 0.25
    elif N == 32:
        return x * (ROOT_8 / 2)
    elif N == 64:
        return x * 0.125
    elif N == 128:
        return x * (ROOT_8 / 4)
    elif N == 256:
        return x * 0.0625
    else:
        return x * (ROOT_8 / 8)


@triton.jit
def turned(x, seed, N: tl.constexpr):
    """Turn.forward of heads x [rows, D] fp32, in fp32."""
    d = tl.broadcast_to(tl.arange(0, x.shape[1])[None], x.shape)
    return divided(mixed(flipped(x, flips(seed, d)), N), N)


@triton.jit
def turned_back(x, seed, d, N: tl.constexpr):
    """Turn.back of x [columns, rows] fp32; d [columns]: the columns' places, from a multiple of N
    on."""
    COLUMNS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    blocks = hadamard(tl.reshape(x, (COLUMNS // N, N, ROWS)), 1)
    x = divided(tl.reshape(blocks, (COLUMNS, ROWS)), N)
    return flipped(x, tl.broadcast_to(flips(seed, d)[:, None], x.shape))
