"""fp8_e4m3 and fp8_e5m2: one byte per element and one static scale per layer and side.

The scale is 1 or the checkpoint's k_scale and v_scale, as in vLLM's formats of these names. An
element is divided by the scale in fp32, rounded to the nearest value of the type, ties to even, and
saturated at its maximum. Elements that are not finite become NaN (0x7F).

Latents, which fp8_e4m3 alone stores, have a scale per token instead: the smallest power of two at
which no element exceeds the type's maximum. With powers of two the division and the product are
exact, and quantizing a dequantized latent again changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVFormat, KVQuantizer

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAN = 0x7F
"""Bits of a NaN in both types."""
FP32_BIAS = 127
"""Biased exponent of 1.0 in the bits of fp32."""
MIN_EXPONENT = FP32_BIAS - 100
"""Smallest biased exponent of a scale. Products are never subnormal, and a token of zeros needs no
special case."""
OVERFLOW_BITS = (FP32_BIAS + 121) << 23
"""Bits of 2^121 in fp32. A token with an element of this magnitude, or one that is not finite,
becomes NaN."""
ROUND_UP_BITS = 0x1FFFFF
"""Addend that carries the bits of fp32 into the exponent from above 1.75, as 448 = 1.75 * 2^8."""


@dataclass(frozen=True)
class Fp8(KVQuantizer):
    """Quantizer to fp8 with a static scale: element = value * scale.

    kind: "e4m3" or "e5m2". scale: of the layer and side.
    """

    kind: str = "e4m3"
    scale: float = 1.0

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def layer_constant(self) -> float | None:
        return None if self.scale == 1.0 else self.scale

    def unsupported_reason(self, dim: int) -> str | None:
        # Kernels load four bytes as one word.
        return None if dim % 4 == 0 else f"values are loaded four at a time, and a head has {dim}"

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        kind = TYPES[self.kind]
        max_value = torch.finfo(kind).max
        scale = torch.tensor(self.scale, dtype=torch.float32, device=x.device)
        values = (x.float() / scale).clamp(-max_value, max_value).to(kind).view(torch.uint8)
        return (values.masked_fill(~x.isfinite(), NAN),)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        return qdata.view(TYPES[self.kind]).float() * self.scale

    @property
    def device_path(self) -> str | None:
        return f"lockstep.kernels.formats.kv.fp8_triton:{self.kind.upper()}"

    @property
    def mma_path(self) -> str | None:
        unscaled = self.kind == "e4m3" and self.layer_constant is None
        return "lockstep.kernels.formats.kv.fp8_mma:E4M3" if unscaled else None


@dataclass(frozen=True)
class TokenFp8(KVQuantizer):
    """Quantizer to e4m3 with a power-of-two scale per token and head: element = value * scale."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def num_scales(self, dim: int) -> int:
        return 1

    def unsupported_reason(self, dim: int) -> str | None:
        return Fp8().unsupported_reason(dim)

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        max_bits = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
        overflow = max_bits >= OVERFLOW_BITS
        # The maximum of the type, 448, has the exponent 8.
        exponents = (
            (((max_bits + ROUND_UP_BITS) >> 23) - 8)
            .clamp_min(MIN_EXPONENT)
            .masked_fill(overflow, FP32_BIAS)
        )
        # 2^-e has the biased exponent 2 * bias - (e + bias): the division is a product.
        scaled = wide * (2 * FP32_BIAS - exponents << 23).view(torch.float32)
        (values,) = Fp8().quantize(scaled.masked_fill(overflow, 0.0))
        return values, (exponents << 23).view(torch.float32).masked_fill(overflow, torch.nan)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return qdata.view(TYPES["e4m3"]).float() * scales

    @property
    def device_path(self) -> str | None:
        return "lockstep.kernels.formats.kv.fp8_triton:TOKEN_E4M3"


E4M3 = KVFormat("fp8_e4m3", Fp8("e4m3"), Fp8("e4m3"), has_static_scales=True, latent=TokenFp8())
E5M2 = KVFormat("fp8_e5m2", Fp8("e5m2"), Fp8("e5m2"), has_static_scales=True)
