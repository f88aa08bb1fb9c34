"""Hadamard rotation of heads: random signs, then Sylvester's matrix in one order of additions.

The rotation spreads outliers of a head over all of its elements, which then are close to normally
distributed and quantize with less error (QuaRot, arXiv 2404.00456).
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
K_BLOCK = 512
"""Numbers of keys and of latents that are rotated together: a whole head, which is no larger."""
V_BLOCK = 64
"""Numbers of values that are rotated together: the columns that a CTA of the combine kernel has."""
HASH_STEP = 0x9E3779B1
"""Distance between the hash inputs of neighbouring columns: odd, 2^32 over the golden ratio."""


def hadamard(x: Tensor) -> Tensor:
    """Multiply x [..., N] fp32, N a power of two, by Sylvester's matrix, without normalization.

    log2(N) butterfly stages add and subtract neighbours; sums come first, then differences. The
    tree of additions of each number depends on N alone.
    """
    for _ in range(x.shape[-1].bit_length() - 1):
        even = x[..., 0::2]
        odd = x[..., 1::2]
        x = torch.cat([even + odd, even - odd], -1)
    return x


@cache
def random_signs(seed: int, dim: int, device: torch.device) -> Tensor:
    """Return [D] fp32 of 1 and -1: the top bit of murmur3's finalizer of seed + column * step."""
    x = (seed + torch.arange(dim, device=device) * HASH_STEP) & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return 1.0 - 2.0 * (x >> 31).float()


@dataclass(frozen=True)
class HadamardRotation:
    """Rotation of heads: random signs, then the Hadamard matrix over sqrt(N) of every N numbers.

    seed: of the signs. block: N, or the whole head where the head is smaller.
    """

    seed: int
    block: int

    def block_size(self, dim: int) -> int:
        """Return the values that are rotated together in heads of this dim."""
        return min(self.block, dim)

    def rotate_unscaled(self, x: Tensor) -> Tensor:
        """Rotate x [..., D] fp32 without the division by sqrt(N) -> [..., D / N, N]."""
        signed = x * random_signs(self.seed, x.shape[-1], x.device)
        return hadamard(signed.unflatten(-1, (-1, self.block_size(x.shape[-1]))))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x [..., D] in fp32."""
        return (self.rotate_unscaled(x.float()) * self._scale(x.shape[-1])).flatten(-2)

    def rotate_back(self, x: Tensor) -> Tensor:
        """Invert the rotation of x [..., D] in fp32."""
        size = self.block_size(x.shape[-1])
        blocks = hadamard(x.float().unflatten(-1, (-1, size))) * self._scale(x.shape[-1])
        return blocks.flatten(-2) * random_signs(self.seed, x.shape[-1], x.device)

    def _scale(self, dim: int) -> float:
        """Return 1 / sqrt(N) in fp32."""
        return inverse_sqrt(self.block_size(dim))


def inverse_sqrt(size: int) -> float:
    """Return 1 / sqrt(size), rounded to fp32."""
    return float(torch.tensor(1 / sqrt(size), dtype=torch.float32))
