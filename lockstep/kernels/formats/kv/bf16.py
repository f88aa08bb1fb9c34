"""bfloat16: values rounded to bf16, to the nearest, ties to even, for models of another dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVFormat, KVQuantizer


@dataclass(frozen=True)
class Bf16(KVQuantizer):
    """Quantizer that stores the number itself in bf16."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.to(torch.bfloat16),)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        return qdata.float()

    @property
    def device_path(self) -> str | None:
        return "lockstep.kernels.formats.kv.bf16_triton:DEVICE"


FORMAT = KVFormat("bfloat16", Bf16(), Bf16(), latent=Bf16())
