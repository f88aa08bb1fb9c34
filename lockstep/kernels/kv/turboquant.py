"""TurboQuant (Zandieh et al., 2025, arXiv 2504.19874), as vLLM's presets have it: reference codecs.

No kernel reads them yet, and so they are not in the table of formats.

Keys: x / |x| is rotated by the Hadamard matrix over sqrt(D), after which each coordinate is close
to N(0, 1 / D); each is taken to the nearest of 2^b centroids (Lloyd-Max of N(0, 1)). Beside the
codes stands |x| in fp16. Norm correction: the centroids' vector is scaled to length 1 before |x|
multiplies it. Values: b bits between the head's least and largest number, both steps in fp16.
"""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from lockstep.kernels.kv import Codec, KVFormat
from lockstep.kernels.kv.bits import pack_bits, packed_bytes, unpack_bits
from lockstep.kernels.kv.fp8 import Fp8

CENTROIDS = {
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
"""Lloyd-Max of N(0, 1), the positive half, by bits (Max, 1960)."""
LEAST_NORM = 1e-8
"""Added to a norm before it divides, as in vLLM: a head of zeros stays one."""
LEAST_STEP = 1e-8
"""Of values; as in vLLM."""
HALF_MOST = 65504.0
"""The largest number of fp16."""


def hadamard(dim: int) -> Tensor:
    """Sylvester's matrix over sqrt(dim) [dim, dim] fp32: symmetric, its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / sqrt(dim)


def centroids(bits: int) -> Tensor:
    """All 2^bits, ascending."""
    half = torch.tensor(CENTROIDS[bits])
    return torch.cat([-half.flip(0), half])


@dataclass(frozen=True)
class RotatedKeys(Codec):
    """bits: 3 or 4. corrected: norm correction."""

    bits: int = 4
    corrected: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def number_dtype(self) -> torch.dtype:
        return torch.float16

    @property
    def count(self) -> int:
        return 1

    def width(self, dim: int) -> int:
        return packed_bytes(dim, self.bits)

    def refusal(self, dim: int) -> str | None:
        if dim & (dim - 1) or dim < 8:
            return f"TurboQuant rotates heads of 8, 16, .. numbers, and this one has {dim}"
        return None

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        dim = x.shape[-1]
        norm = wide.norm(dim=-1, keepdim=True)
        turned = wide / (norm + LEAST_NORM) @ hadamard(dim) * sqrt(dim)
        points = centroids(self.bits)
        codes = torch.bucketize(turned, (points[1:] + points[:-1]) / 2)
        lost = ~wide.isfinite().all(-1, keepdim=True) | (norm > HALF_MOST)
        return pack_bits(codes, self.bits), norm.masked_fill(lost, torch.nan).half()

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        assert numbers is not None
        dim = codes.shape[-1] * 8 // self.bits
        found = centroids(self.bits)[unpack_bits(codes, self.bits, dim)] / sqrt(dim)
        if self.corrected:
            found = found / (found.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        return found @ hadamard(dim) * numbers.float()


@dataclass(frozen=True)
class UniformValues(Codec):
    """bits: 3 or 4; a code times the step, plus the least number, both beside the codes."""

    bits: int = 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def number_dtype(self) -> torch.dtype:
        return torch.float16

    @property
    def count(self) -> int:
        return 2

    def width(self, dim: int) -> int:
        return packed_bytes(dim, self.bits)

    def refusal(self, dim: int) -> str | None:
        return None if dim % 8 == 0 else f"its codes fill bytes by 8 numbers, and a head has {dim}"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        least, most = wide.aminmax(dim=-1, keepdim=True)
        top = 2**self.bits - 1
        step = ((most - least) / top).clamp_min(LEAST_STEP)
        codes = ((wide - least) / step).round().nan_to_num(0.0).clamp(0, top)
        lost = ~wide.isfinite().all(-1, keepdim=True) | (wide.abs() > HALF_MOST).any(-1, True)
        lost |= step > HALF_MOST
        numbers = torch.cat([step, least], -1).masked_fill(lost, torch.nan)
        return pack_bits(codes, self.bits), numbers.half()

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        assert numbers is not None
        step, least = numbers.float().split(1, dim=-1)
        found = unpack_bits(codes, self.bits, codes.shape[-1] * 8 // self.bits)
        return found * step + least


PRESETS = {
    preset.name: preset
    for preset in (
        KVFormat("turboquant_k8v4", Fp8("e4m3"), UniformValues(4)),
        KVFormat("turboquant_4bit_nc", RotatedKeys(4), UniformValues(4)),
        KVFormat("turboquant_k3v4_nc", RotatedKeys(3), UniformValues(4)),
        KVFormat("turboquant_3bit_nc", RotatedKeys(3), UniformValues(3)),
    )
}
"""By vLLM's names. The first and last layers of dense models are to be left out, see
kv_cache_dtype_skip_layers."""
