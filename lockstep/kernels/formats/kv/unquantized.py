"""Numbers of the model's dtype in a Hadamard rotation: what a rotated cache dequantizes to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import HadamardRotation, KVQuantizer
from lockstep.kernels.formats.kv.hadamard import V_BLOCK


@dataclass(frozen=True)
class Unquantized(KVQuantizer):
    """Quantizer that only rotates, for tests.

    model_dtype: dtype of the values. head_rotation: rotation in blocks of V_BLOCK or K_BLOCK.
    """

    model_dtype: torch.dtype
    head_rotation: HadamardRotation

    @property
    def dtype(self) -> torch.dtype:
        return self.model_dtype

    @property
    def layer_constant(self) -> int:
        return self.head_rotation.seed

    @property
    def rotation(self) -> HadamardRotation:
        return self.head_rotation

    def quantize(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.head_rotation.rotate(x).to(self.model_dtype),)

    def dequantize(self, qdata: Tensor, scales: Tensor | None) -> Tensor:
        return qdata.float()

    @property
    def device_path(self) -> str | None:
        side = "VALUES" if self.head_rotation.block == V_BLOCK else "KEYS"
        return f"lockstep.kernels.formats.kv.unquantized_triton:{side}"
