"""int8_per_token_head: one byte per number and one fp32 scale per token and head.

Keys and values each have their own scales, as in vLLM's format of this name. The scale is the
largest absolute value among the head's D numbers over 127; a quantized value is a number over the
scale, to the nearest integer, ties to even. The scale is 0 where all numbers are 0, and NaN where
one is not finite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVFormat, KVQuantizer

MAX_VALUE = 127
"""Largest quantized value. -128 is not used, so that x and -x quantize symmetrically."""


@dataclass(frozen=True)
class Int8(KVQuantizer):
    """Quantizer to int8 with one scale per token and head: number = value * scale."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def num_scales(self, dim: int) -> int:
        return 1

    def unsupported_reason(self, dim: int) -> str | None:
        # Kernels load four bytes as one word.
        return None if dim % 4 == 0 else f"values are loaded four at a time, and a head has {dim}"

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        finite = wide.isfinite().all(-1, keepdim=True)
        scale = wide.abs().amax(-1, keepdim=True) / MAX_VALUE
        values = (wide / torch.where(scale > 0, scale, 1.0)).round().clamp(-MAX_VALUE, MAX_VALUE)
        values = torch.where(finite, values, 0.0).to(torch.int8)
        return values, scale.masked_fill(~finite, torch.nan)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        assert scales is not None
        return qdata.float() * scales

    @property
    def device_path(self) -> str | None:
        return "lockstep.kernels.formats.kv.int8_triton:DEVICE"


FORMAT = KVFormat("int8_per_token_head", Int8(), Int8(), latent=Int8())
