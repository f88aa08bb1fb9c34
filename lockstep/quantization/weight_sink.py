"""A slot: what takes over one tensor of a checkpoint. A stack: several, taken over as one."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.kernels.upload import upload, upload_concatenated

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that are not packed."""


@dataclass(frozen=True)
class WeightSink:
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
    ) -> "WeightSink":
        """Of a tensor of the checkpoint's shape that holds what `take` makes of the checkpoint's,
        rounded to its own dtype."""
        data = target.data
        return cls(
            tuple(data.shape), FLOAT_DTYPES, data.device, lambda found: data.copy_(take(found))
        )

    @classmethod
    def of(cls, target: "Tensor | WeightSink") -> "WeightSink":
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


class FusedExpertSink:
    """The tensors of `parts` wait where they were read, and are handed to `whole` as one, joined
    along `dim` in the order of parts: 256 experts then cost the launches of one."""

    def __init__(self, whole: WeightSink, parts: Sequence[WeightSink], dim: int) -> None:
        self.whole = whole
        self.parts = list(parts)
        self.dim = dim
        self.waiting: dict[int, Tensor] = {}

    @classmethod
    def slots(cls, whole: WeightSink | None, parts: Sequence[WeightSink]) -> list[WeightSink]:
        """A slot for each part that hands over as one where the shapes say how; else the parts."""
        dim = None if whole is None else _joined_along(whole, parts)
        if whole is None or dim is None:
            return list(parts)
        stack = cls(whole, parts, dim)
        return [
            WeightSink(part.shape, part.dtypes, torch.device("cpu"), partial(stack.take, index))
            for index, part in enumerate(parts)
        ]

    def take(self, index: int, tensor: Tensor) -> None:
        """The tensor of a part. Raises CheckpointError, naming a part, where one does not fit."""
        self.waiting[index] = tensor
        if len(self.waiting) < len(self.parts):
            return
        found = [self.waiting[i] for i in range(len(self.parts))]
        self.waiting.clear()
        joined = self._joined(found)
        if joined is None:
            self._apart(found)
            return
        try:
            self.whole.fill(joined)
        except CheckpointError:
            self._apart(found)
            raise

    def _joined(self, found: Sequence[Tensor]) -> Tensor | None:
        """All of them in one, on the device; None where their dtypes differ."""
        dtype = found[0].dtype
        if any(tensor.dtype != dtype for tensor in found):
            return None
        assert self.whole.shape is not None, "else there is no stack"
        flat = upload_concatenated(found, self.whole.device)
        if self.dim == 0:
            return flat.view(self.whole.shape)
        sizes = [tensor.numel() for tensor in found]
        parts = zip(flat.split(sizes), found, strict=True)
        return torch.cat([part.view(tensor.shape) for part, tensor in parts], self.dim)

    def _apart(self, found: Sequence[Tensor]) -> None:
        for part, tensor in zip(self.parts, found, strict=True):
            part.fill(upload(tensor, part.device))


def _joined_along(whole: WeightSink, parts: Sequence[WeightSink]) -> int | None:
    """The dimension along which the parts' tensors make up that of `whole`, if there is one."""
    shapes = Counter(part.shape for part in parts)
    if whole.shape is None or any(part.dtypes != whole.dtypes for part in parts):
        return None
    for dim, size in enumerate(whole.shape):
        sums = 0
        for shape, count in shapes.items():
            if shape is None or len(shape) != len(whole.shape):
                return None
            rest = shape[:dim] + whole.shape[dim : dim + 1] + shape[dim + 1 :]
            sums += count * (shape[dim] if rest == whole.shape else size + 1)
        if sums == size:
            return dim
    return None
