"""Numbers of the model's dtype, rotated as another codec rotates them: what it unpacks to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, Turn
from lockstep.kernels.formats.kv.hadamard import OF_VALUES


@dataclass(frozen=True)
class Plain(Codec):
    """model: the dtype. rotation: that the numbers lie in, of OF_VALUES or WHOLE_HEAD."""

    model: torch.dtype
    rotation: Turn

    @property
    def dtype(self) -> torch.dtype:
        return self.model

    @property
    def constant(self) -> int:
        return self.rotation.seed

    @property
    def turn(self) -> Turn:
        return self.rotation

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.rotation.forward(x).to(self.model),)

    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        return codes.float()

    @property
    def device_at(self) -> str | None:
        side = "VALUES" if self.rotation.block == OF_VALUES else "KEYS"
        return f"lockstep.kernels.formats.kv.unquantized_triton:{side}"
