"""Numbers of the model's dtype, rotated as another codec rotates them: what it unpacks to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.kv import Codec, Turn


@dataclass(frozen=True)
class Plain(Codec):
    """model: the dtype. rotation: that the numbers lie in."""

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
        return "lockstep.kernels.kv._plain_device:DEVICE"
