"""TurboQuant (Zandieh et al., 2025, arXiv 2504.19874): keys, values or both in 3 or 4 bits.

A block of numbers (a head of keys, a latent, 64 of a head's values) is rotated by random signs and
the Hadamard matrix, after which each is close to N(0, |x|^2 / block); each is taken to the nearest
of 2^b points (Lloyd-Max of N(0, 1)), and beside the codes stands one number in bf16: |x| over the
length of the points' vector, so that what is unpacked has the block's length (norm correction).

Numbers stay rotated. Queries are rotated as keys are, once a step, when they are made; what
attention found among values is rotated back once, before it is rounded. docs/cache.md has the
definition to the bit, layouts and distortions.
"""

from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, KVFormat, Turn
from lockstep.kernels.formats.kv.bit_packing import pack_bits, packed_words, unpack_bits
from lockstep.kernels.formats.kv.fp8 import Fp8
from lockstep.kernels.formats.kv.hadamard import OF_VALUES, WHOLE_HEAD

POINTS = {
    3: (0.2451171875, 0.7578125, 1.34375, 2.15625),
    4: (0.1279296875, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375),
}
"""Lloyd-Max of N(0, 1), the positive half, by bits (Max, 1960), rounded to bf16: so that a point
times a number of bf16 is exact in fp32, and rounded once in any other dtype."""
ONE = 127
"""The exponent of 1 in the bits of fp32."""
LEAST = ONE - 100
"""Blocks whose largest number is below 2^-100 are zeros: nothing is subnormal then."""
MOST = ONE + 120
"""Blocks with a number of 2^121 and more, or one that is not finite, become NaN."""
MOST_BLOCKS = 4
"""Blocks of a head: kernels read the numbers beside its codes by two words."""


def thresholds(bits: int) -> tuple[float, ...]:
    """Half-way between neighbouring points of POINTS; exact in fp32."""
    points = POINTS[bits]
    return tuple((a + b) / 2 for a, b in zip(points, points[1:], strict=False))


@dataclass(frozen=True)
class Rotated(Codec):
    """bits: 3 or 4. block: numbers that are rotated together. seed: of the signs, the layer's.

    A code is a point's place in POINTS, and a sign above it.
    """

    bits: int
    block: int
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def number_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def count(self, dim: int) -> int:
        return dim // self.turn.size(dim)

    @property
    def constant(self) -> int:
        return self.seed

    @property
    def turn(self) -> Turn:
        return Turn(self.seed, self.block)

    def width(self, dim: int) -> int:
        return packed_words(dim, self.bits)

    def refusal(self, dim: int) -> str | None:
        most = min(MOST_BLOCKS * self.block, WHOLE_HEAD)
        if dim & (dim - 1) or not 16 <= dim <= most:
            return f"TurboQuant rotates heads of 16, 32, .. or {most} numbers, and one has {dim}"
        return None

    def of_layer(self, layer: str) -> "Rotated":
        return replace(self, seed=crc32(layer.encode()) >> 1)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        dim = x.shape[-1]
        blocks = x.float().unflatten(-1, (-1, self.turn.size(dim)))
        exponents = blocks.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
        lost = (exponents > MOST) | ~blocks.isfinite().all(-1, keepdim=True)
        usable = (exponents >= LEAST) & ~lost
        exponents = torch.where(usable, exponents, ONE)
        scaled = torch.where(usable, blocks, 0.0) * _power(2 * ONE + 1 - exponents)
        norm = _squares(scaled).sqrt()
        turned = self.turn.mixed(scaled.flatten(-2))
        steps = torch.tensor(thresholds(self.bits), device=x.device) * norm[..., None]
        places = (turned.abs()[..., None] > steps).sum(-1)
        points = torch.tensor(POINTS[self.bits], device=x.device)[places]
        numbers = norm / _squares(points).sqrt() * _power(exponents - 1)
        numbers = torch.where(usable, numbers, 0.0).masked_fill(lost, torch.nan)
        codes = places + ((turned < 0).long() << self.bits - 1)
        return pack_bits(codes.flatten(-2), self.bits), numbers.squeeze(-1).to(torch.bfloat16)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        assert numbers is not None
        half = torch.tensor(POINTS[self.bits], device=codes.device)
        points = torch.cat([half, -half])[unpack_bits(codes, self.bits)]
        blocks = points.unflatten(-1, (numbers.shape[-1], -1))
        return (blocks * numbers.float()[..., None]).flatten(-2)

    @property
    def device_at(self) -> str | None:
        side = "KEYS" if self.block == WHOLE_HEAD else "VALUES"
        return f"lockstep.kernels.formats.kv.turboquant_triton:{side}_{self.bits}"

    @property
    def fragments_at(self) -> str | None:
        return f"lockstep.kernels.formats.kv.turboquant_mma:BITS_{self.bits}"


def _power(exponents: Tensor) -> Tensor:
    """2^(e - 127) of exponents as fp32 has them."""
    return (exponents << 23).view(torch.float32)


def _squares(x: Tensor) -> Tensor:
    """The sum of squares [..., 1] of x [..., N], a power of two: neighbours are added, then sums of
    neighbours."""
    total = x * x
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total


KEYS_3 = Rotated(3, WHOLE_HEAD)
KEYS_4 = Rotated(4, WHOLE_HEAD)
VALUES_3 = Rotated(3, OF_VALUES)
VALUES_4 = Rotated(4, OF_VALUES)
PRESETS = {
    preset.name: preset
    for preset in (
        KVFormat("turboquant_k8v4", Fp8("e4m3"), VALUES_4),
        KVFormat("turboquant_4bit_nc", KEYS_4, VALUES_4, latent=KEYS_4),
        KVFormat("turboquant_k3v4_nc", KEYS_3, VALUES_4),
        KVFormat("turboquant_3bit_nc", KEYS_3, VALUES_3, latent=KEYS_3),
    )
}
"""By the names that vLLM's users know. kv_cache_dtype_skip_layers leaves out the first and last
layers of a dense model, which suffer most."""
