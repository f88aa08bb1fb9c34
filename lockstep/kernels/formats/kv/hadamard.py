"""Rotations of heads: random signs, then the Hadamard matrix, in one order of additions."""

from dataclasses import dataclass
from functools import cache
from math import sqrt

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
WHOLE_HEAD = 512
"""Block of keys and of latents: the largest of them that is rotated."""
OF_VALUES = 64
"""Block of values: kernels that end an output know 64 of its columns."""
STEP = 0x9E3779B1
"""Between the hashed numbers of two places of a head; odd, 2^32 over the golden ratio."""


def hadamard(x: Tensor) -> Tensor:
    """x [..., N] fp32, N a power of two -> Sylvester's matrix times x, not divided by anything.

    log2(N) rounds: neighbours are added and subtracted; sums come first, then differences. So each
    number is a tree of additions that depends on N alone.
    """
    for _ in range(x.shape[-1].bit_length() - 1):
        even = x[..., 0::2]
        odd = x[..., 1::2]
        x = torch.cat([even + odd, even - odd], -1)
    return x


@cache
def signs(seed: int, dim: int, device: torch.device) -> Tensor:
    """[D] fp32 of 1 and -1: the top bit of murmur3's finaliser over seed + place * STEP."""
    x = (seed + torch.arange(dim, device=device) * STEP) & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return 1.0 - 2.0 * (x >> 31).float()


@dataclass(frozen=True)
class Turn:
    """A rotation of heads: signs by the seed, then the Hadamard matrix over sqrt(block) of every
    `block` numbers; of all of them where the head has fewer."""

    seed: int
    block: int

    def size(self, dim: int) -> int:
        """Numbers that are rotated together, in heads of this dim."""
        return min(self.block, dim)

    def mixed(self, x: Tensor) -> Tensor:
        """x [..., D] fp32 -> [..., D / size, size], rotated but for the division by sqrt(size)."""
        signed = x * signs(self.seed, x.shape[-1], x.device)
        return hadamard(signed.unflatten(-1, (-1, self.size(x.shape[-1]))))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> rotated, in fp32."""
        return (self.mixed(x.float()) * self._factor(x.shape[-1])).flatten(-2)

    def back(self, x: Tensor) -> Tensor:
        """x [..., D] -> rotated back, in fp32."""
        size = self.size(x.shape[-1])
        turned = hadamard(x.float().unflatten(-1, (-1, size))) * self._factor(x.shape[-1])
        return turned.flatten(-2) * signs(self.seed, x.shape[-1], x.device)

    def _factor(self, dim: int) -> float:
        """1 / sqrt(size) in fp32."""
        return factor_of(self.size(dim))


def factor_of(size: int) -> float:
    """1 / sqrt(size), rounded to fp32."""
    return float(torch.tensor(1 / sqrt(size), dtype=torch.float32))
