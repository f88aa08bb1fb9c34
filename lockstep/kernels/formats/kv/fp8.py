"""fp8_e4m3 and fp8_e5m2: one byte a number, with one scale for a layer's keys and one for its
values: 1, or the checkpoint's static k_scale and v_scale. As vLLM's formats of these names.

A number is divided by the scale in fp32, taken to the nearest number of the type, ties to even, and
at most to its largest one. What is not finite becomes NaN (0x7F).

Latents, for which fp8_e4m3 alone serves, have a scale for each token instead: the least power of
two at which none of its numbers exceeds the type's largest. Powers of two make the division, the
product and packing twice exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, KVFormat

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAN = 0x7F
"""A NaN of either type."""
ONE = 127
"""The exponent of 1 in the bits of fp32."""
LEAST = ONE - 100
"""Of scales: no product is subnormal then, and a token of zeros needs no case of its own."""
LARGE = (ONE + 121) << 23
"""2^121 in the bits of fp32: a token with a number of this size, or one that is not finite, becomes
NaN."""
WHOLE = 0x1FFFFF
"""What makes the bits of fp32 carry into the exponent from above 1.75, as 448 is 1.75 x 2^8."""


@dataclass(frozen=True)
class Fp8(Codec):
    """kind: e4m3 or e5m2. A code times the scale is the number."""

    kind: str = "e4m3"
    scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def constant(self) -> float | None:
        return None if self.scale == 1.0 else self.scale

    def refusal(self, dim: int) -> str | None:
        return None if dim % 4 == 0 else f"codes are read by fours, and a head has {dim}"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        kind = TYPES[self.kind]
        most = torch.finfo(kind).max
        scale = torch.tensor(self.scale, dtype=torch.float32, device=x.device)
        codes = (x.float() / scale).clamp(-most, most).to(kind).view(torch.uint8)
        return (codes.masked_fill(~x.isfinite(), NAN),)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        return codes.view(TYPES[self.kind]).float() * self.scale

    @property
    def device_at(self) -> str | None:
        return f"lockstep.kernels.formats.kv.fp8_triton:{self.kind.upper()}"

    @property
    def fragments_at(self) -> str | None:
        plain = self.kind == "e4m3" and self.constant is None
        return "lockstep.kernels.formats.kv.fp8_mma:E4M3" if plain else None


@dataclass(frozen=True)
class TokenFp8(Codec):
    """e4m3 with a power of two for each token and head, beside the codes. A code times it is the
    number."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def count(self, dim: int) -> int:
        return 1

    def refusal(self, dim: int) -> str | None:
        return Fp8().refusal(dim)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        most = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
        lost = most >= LARGE
        exponents = (((most + WHOLE) >> 23) - 8).clamp_min(LEAST).masked_fill(lost, ONE)
        scaled = wide * (2 * ONE - exponents << 23).view(torch.float32)
        (codes,) = Fp8().encode(scaled.masked_fill(lost, 0.0))
        return codes, (exponents << 23).view(torch.float32).masked_fill(lost, torch.nan)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        assert numbers is not None
        return codes.view(TYPES["e4m3"]).float() * numbers

    @property
    def device_at(self) -> str | None:
        return "lockstep.kernels.formats.kv.fp8_triton:TOKEN_E4M3"


E4M3 = KVFormat("fp8_e4m3", Fp8("e4m3"), Fp8("e4m3"), scaled=True, latent=TokenFp8())
E5M2 = KVFormat("fp8_e5m2", Fp8("e5m2"), Fp8("e5m2"), scaled=True)
