"""int8_per_token_head: one byte a number, and one fp32 scale for each token and head, of the keys
and of the values each. As vLLM's format of this name.

The scale is the largest size among the head's D numbers over 127; a code is a number over the
scale, to the nearest whole one, ties to even. Where all are 0 the scale is 0; where one is not
finite it is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, KVFormat

MOST = 127
"""The largest code: -128 is not used, so that x and -x have codes of one size."""


@dataclass(frozen=True)
class Int8(Codec):
    """A code times the scale beside it is the number."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8

    def count(self, dim: int) -> int:
        return 1

    def refusal(self, dim: int) -> str | None:
        return None if dim % 4 == 0 else f"codes are read by fours, and a head has {dim}"

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        finite = wide.isfinite().all(-1, keepdim=True)
        scale = wide.abs().amax(-1, keepdim=True) / MOST
        codes = (wide / torch.where(scale > 0, scale, 1.0)).round().clamp(-MOST, MOST)
        codes = torch.where(finite, codes, 0.0).to(torch.int8)
        return codes, scale.masked_fill(~finite, torch.nan)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        assert numbers is not None
        return codes.float() * numbers

    @property
    def device_at(self) -> str | None:
        return "lockstep.kernels.formats.kv.int8_triton:DEVICE"


FORMAT = KVFormat("int8_per_token_head", Int8(), Int8(), latent=Int8())
