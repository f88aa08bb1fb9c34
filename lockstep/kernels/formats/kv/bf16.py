"""bfloat16: numbers rounded to bf16, to the nearest, ties to even; for models of another dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, KVFormat


@dataclass(frozen=True)
class Bf16(Codec):
    """The number itself in bf16."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(torch.bfloat16),)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        return codes.float()

    @property
    def device_at(self) -> str | None:
        return "lockstep.kernels.formats.kv.bf16_triton:DEVICE"


FORMAT = KVFormat("bfloat16", Bf16(), Bf16(), latent=Bf16())
