"""TurboQuant (Zandieh et al., 2025, arXiv 2504.19874): keys, values or both in 3 or 4 bits.

A block of numbers (a head of keys, a latent, 64 of a head's values) is rotated by random signs and
the Hadamard matrix. Each rotated number is close to N(0, |x|^2 / block) and is rounded to the
nearest of 2^b centroids (Lloyd-Max of N(0, 1)). One bf16 scale per block, |x| over the norm of the
centroids, gives the dequantized block the norm of the block (norm correction).

Values stay rotated. Queries are rotated as keys are, once per step; the attention output is
rotated back once, before it is rounded. docs/cache.md has the definition to the bit, the layouts
and the distortions.
"""

from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import HadamardRotation, KVFormat, KVQuantizer
from lockstep.kernels.formats.kv.bit_packing import num_words, pack_bits, unpack_bits
from lockstep.kernels.formats.kv.fp8 import Fp8
from lockstep.kernels.formats.kv.hadamard import K_BLOCK, V_BLOCK

CENTROIDS = {
    3: (0.2451171875, 0.7578125, 1.34375, 2.15625),
    4: (0.1279296875, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375),
}
"""Lloyd-Max centroids of N(0, 1) by bits, the positive half (Max, 1960), rounded to bf16: a
centroid times a bf16 scale is exact in fp32, and is rounded once in any other dtype."""
FP32_BIAS = 127
"""Biased exponent of 1.0 in the bits of fp32."""
MIN_EXPONENT = FP32_BIAS - 100
"""Blocks whose largest number is below 2^-100 become zeros. No intermediate result is subnormal."""
MAX_EXPONENT = FP32_BIAS + 120
"""Blocks with a number of 2^121 and more, or one that is not finite, become NaN."""
MAX_BLOCKS = 4
"""Maximum blocks of a head: kernels load the scales of a head as two 32-bit words."""


def thresholds(bits: int) -> tuple[float, ...]:
    """Return the midpoints between neighbouring centroids, which are exact in fp32."""
    centroids = CENTROIDS[bits]
    return tuple((a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False))


@dataclass(frozen=True)
class TurboQuantizer(KVQuantizer):
    """Quantizer to centroids in a Hadamard rotation.

    A code is an index into CENTROIDS with a sign bit above it. bits: 3 or 4. block: values that
    are rotated together. seed: of the random signs, the layer's.
    """

    bits: int
    block: int
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def num_scales(self, dim: int) -> int:
        return dim // self.rotation.block_size(dim)

    @property
    def layer_constant(self) -> int:
        return self.seed

    @property
    def rotation(self) -> HadamardRotation:
        return HadamardRotation(self.seed, self.block)

    def row_width(self, dim: int) -> int:
        return num_words(dim, self.bits)

    def unsupported_reason(self, dim: int) -> str | None:
        max_dim = min(MAX_BLOCKS * self.block, K_BLOCK)
        if dim & (dim - 1) or not 16 <= dim <= max_dim:
            return f"TurboQuant rotates heads of 16, 32, .. or {max_dim} numbers, and one has {dim}"
        return None

    def for_layer(self, layer: str) -> "TurboQuantizer":
        return replace(self, seed=crc32(layer.encode()) >> 1)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        dim = x.shape[-1]
        blocks = x.float().unflatten(-1, (-1, self.rotation.block_size(dim)))
        exponents = blocks.abs().amax(-1, keepdim=True).view(torch.int32) >> 23
        overflow = (exponents > MAX_EXPONENT) | ~blocks.isfinite().all(-1, keepdim=True)
        usable = (exponents >= MIN_EXPONENT) & ~overflow
        exponents = torch.where(usable, exponents, FP32_BIAS)
        # Scaled to a largest number in [2, 4): squares neither overflow nor become subnormal.
        scaled = torch.where(usable, blocks, 0.0) * _power_of_two(2 * FP32_BIAS + 1 - exponents)
        norm = _sum_of_squares(scaled).sqrt()
        rotated = self.rotation.rotate_unscaled(scaled.flatten(-2))
        # Unscaled, the rotated values are N(0, norm^2): the thresholds are scaled instead.
        steps = torch.tensor(thresholds(self.bits), device=x.device) * norm[..., None]
        indices = (rotated.abs()[..., None] > steps).sum(-1)
        centroids = torch.tensor(CENTROIDS[self.bits], device=x.device)[indices]
        scales = norm / _sum_of_squares(centroids).sqrt() * _power_of_two(exponents - 1)
        scales = torch.where(usable, scales, 0.0).masked_fill(overflow, torch.nan)
        codes = indices + ((rotated < 0).long() << self.bits - 1)
        return pack_bits(codes.flatten(-2), self.bits), scales.squeeze(-1).to(torch.bfloat16)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        half = torch.tensor(CENTROIDS[self.bits], device=qdata.device)
        centroids = torch.cat([half, -half])[unpack_bits(qdata, self.bits)]
        blocks = centroids.unflatten(-1, (scales.shape[-1], -1))
        return (blocks * scales.float()[..., None]).flatten(-2)

    @property
    def device_path(self) -> str | None:
        side = "KEYS" if self.block == K_BLOCK else "VALUES"
        return f"lockstep.kernels.formats.kv.turboquant_triton:{side}_{self.bits}"

    @property
    def mma_path(self) -> str | None:
        return f"lockstep.kernels.formats.kv.turboquant_mma:BITS_{self.bits}"


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(e - 127) of biased exponents."""
    return (exponents << 23).view(torch.float32)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares [..., 1] of x [..., N], N a power of two, as a binary tree."""
    total = x * x
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total


KEYS_3 = TurboQuantizer(3, K_BLOCK)
KEYS_4 = TurboQuantizer(4, K_BLOCK)
VALUES_3 = TurboQuantizer(3, V_BLOCK)
VALUES_4 = TurboQuantizer(4, V_BLOCK)
PRESETS = {
    preset.name: preset
    for preset in (
        KVFormat("turboquant_k8v4", Fp8("e4m3"), VALUES_4),
        KVFormat("turboquant_4bit_nc", KEYS_4, VALUES_4, latent=KEYS_4),
        KVFormat("turboquant_k3v4_nc", KEYS_3, VALUES_4),
        KVFormat("turboquant_3bit_nc", KEYS_3, VALUES_3, latent=KEYS_3),
    )
}
"""TurboQuant formats by the names that vLLM's users know. The first and last layers of a dense
model lose most by them; kv_cache_dtype_skip_layers keeps those in the model's dtype."""
