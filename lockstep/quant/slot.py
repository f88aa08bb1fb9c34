"""A slot: what takes over one tensor of a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PLAIN = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that are not packed."""


@dataclass(frozen=True)
class Slot:
    """shape and dtypes: what the checkpoint's tensor must be; fill: takes it over.

    shape None: any. The tensor comes to `fill` on the device where it is needed.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    fill: Callable[[Tensor], object]

    @classmethod
    def plain(
        cls, target: Tensor, take: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> "Slot":
        """Of a tensor of the checkpoint's shape that holds what `take` makes of the checkpoint's,
        rounded to its own dtype."""
        data = target.data
        return cls(tuple(data.shape), PLAIN, data.device, lambda found: data.copy_(take(found)))

    @classmethod
    def of(cls, target: "Tensor | Slot") -> "Slot":
        """A layer names either."""
        return cls.plain(target) if isinstance(target, Tensor) else target

    def fault(self, tensor: Tensor) -> str | None:
        """Why the tensor does not fit; None if it does."""
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            return f"shape {tuple(tensor.shape)}, config.json asks for {self.shape}"
        if tensor.dtype not in self.dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"{tensor.dtype}, expected {known}"
        return None
