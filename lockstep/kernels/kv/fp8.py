"""fp8_e4m3 and fp8_e5m2: one byte a number, with one scale for a layer's keys and one for its
values: 1, or the checkpoint's static k_scale and v_scale. As vLLM's formats of these names.

A number is divided by the scale in fp32, taken to the nearest number of the type, ties to even, and
at most to its largest one. What is not finite becomes NaN (0x7F).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.kv import Codec, KVFormat

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAN = 0x7F
"""A NaN of either type."""


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
        return f"lockstep.kernels.kv._fp8_device:{self.kind.upper()}"

    @property
    def fragments_at(self) -> str | None:
        plain = self.kind == "e4m3" and self.constant is None
        return "lockstep.kernels.kv._fp8_fragments:E4M3" if plain else None


E4M3 = KVFormat("fp8_e4m3", Fp8("e4m3"), Fp8("e4m3"), scaled=True)
E5M2 = KVFormat("fp8_e5m2", Fp8("e5m2"), Fp8("e5m2"), scaled=True)
