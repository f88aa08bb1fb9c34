"""Weight sinks: each takes one tensor of a checkpoint and writes it into the model."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.kernels.upload import upload, upload_concatenated

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not quantized."""
Ranges = tuple[tuple[int, int], ...]
"""(begin, end) of ranges of output columns; empty for all columns."""


@dataclass(frozen=True)
class WeightSink:
    """Destination of one tensor of a checkpoint.

    shape: of the whole tensor in the checkpoint, None for any. dtypes: that it may have. device:
    where `fill` wants it. fill: writes the tensor (this rank's slice of it) into the model.
    shard_axis: axis that runs over the output columns, None if there is none (a scale of the whole
    weight). outputs_per_element: output columns per element of that axis, 8 for 4-bit values in
    int32 words. ranges: output columns of this rank.
    """

    shape: tuple[int, ...] | None
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    fill: Callable[[Tensor], object]
    shard_axis: int | None = 0
    outputs_per_element: int = 1
    ranges: Ranges = ()

    @classmethod
    def copy_into(
        cls,
        target: Tensor,
        transform: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        *,
        ranges: Ranges = (),
        total_rows: int | None = None,
    ) -> "WeightSink":
        """Return a sink that copies a tensor of the target's shape, rounded to the target's dtype.

        Args:
            transform: applied to the checkpoint's tensor before it is copied.
            ranges: rows of the checkpoint's tensor that the target has; empty for all of them.
            total_rows: rows of the checkpoint's tensor, if the target has only some of them.
        """
        data = target.data
        rows = total_rows if ranges and total_rows is not None else data.shape[0]
        return cls(
            (rows, *data.shape[1:]),
            FLOAT_DTYPES,
            data.device,
            lambda tensor: data.copy_(transform(tensor)),
            ranges=ranges,
        )

    @classmethod
    def of(cls, target: "Tensor | WeightSink") -> "WeightSink":
        """Return the sink itself, or one that copies into a tensor."""
        return cls.copy_into(target) if isinstance(target, Tensor) else target

    def mismatch(self, tensor: Tensor) -> str | None:
        """Return why the tensor does not fit; None if it does."""
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            return f"shape {tuple(tensor.shape)}, config.json asks for {self.shape}"
        if tensor.dtype not in self.dtypes:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"{tensor.dtype}, expected {known}"
        return None

    def narrow(self, tensor: Tensor) -> Tensor:
        """Return the slice of the checkpoint's tensor with this rank's output columns.

        Raises:
            CheckpointError: a range begins or ends within an element, such as an int32 word.
        """
        axis = self.shard_axis
        if not self.ranges or axis is None:
            return tensor
        unit = self.outputs_per_element
        slices = []
        for begin, end in self.ranges:
            stop = -(-end // unit)
            # The last element may be partly filled; every other edge must be that of an element.
            if begin % unit or (end % unit and stop < tensor.shape[axis]):
                raise CheckpointError(
                    f"Output columns {begin} to {end} of a quantized weight are not whole groups "
                    f"of {unit}, which its format stores together; allowed: ranks that hold "
                    f"multiples of {unit} columns. Choose a smaller tensor_parallel_size."
                )
            slices.append(tensor.narrow(axis, begin // unit, stop - begin // unit))
        return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, axis)


class FusedExpertSink:
    """Sink of all experts' tensors of one kind, which are copied to the device as one.

    The tensors of `parts` are collected on the host, joined along `dim` in the order of the parts
    and passed to `target`: 256 experts then cost the copies and launches of one.
    """

    def __init__(self, target: WeightSink, parts: Sequence[WeightSink], dim: int) -> None:
        self.target = target
        self.parts = list(parts)
        self.dim = dim
        # By index: a file's tensors come in its order, not in that of the experts.
        self.waiting: dict[int, Tensor] = {}

    @classmethod
    def sinks(cls, target: WeightSink | None, parts: Sequence[WeightSink]) -> list[WeightSink]:
        """Return a sink per part that feeds one FusedExpertSink; the parts where none is possible.

        Shapes and dtypes decide whether the parts' tensors make up that of `target`.
        """
        dim = None if target is None else _join_dim(target, parts)
        if target is None or dim is None:
            return list(parts)
        collector = cls(target, parts, dim)
        return [
            WeightSink(part.shape, part.dtypes, torch.device("cpu"), partial(collector.take, index))
            for index, part in enumerate(parts)
        ]

    def take(self, index: int, tensor: Tensor) -> None:
        """Collect the tensor of a part; the last one fills the target.

        Raises:
            CheckpointError: a tensor does not fit; the message names its part.
        """
        self.waiting[index] = tensor
        if len(self.waiting) < len(self.parts):
            return
        tensors = [self.waiting[i] for i in range(len(self.parts))]
        self.waiting.clear()
        joined = self._join(tensors)
        if joined is None:
            self._fill_parts(tensors)
            return
        try:
            self.target.fill(joined)
        except CheckpointError:
            # The error names the fused weight; filling part by part raises one for the expert.
            self._fill_parts(tensors)
            raise

    def _join(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Return all tensors as one on the device; None if their dtypes differ."""
        dtype = tensors[0].dtype
        if any(tensor.dtype != dtype for tensor in tensors):
            return None
        assert self.target.shape is not None, "_join_dim compared the shapes"
        flat = upload_concatenated(tensors, self.target.device)
        if self.dim == 0:
            return flat.view(self.target.shape)
        sizes = [tensor.numel() for tensor in tensors]
        parts = zip(flat.split(sizes), tensors, strict=True)
        return torch.cat([part.view(tensor.shape) for part, tensor in parts], self.dim)

    def _fill_parts(self, tensors: Sequence[Tensor]) -> None:
        """Upload each tensor and fill the part that belongs to it."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.fill(upload(tensor, part.device))


def _join_dim(target: WeightSink, parts: Sequence[WeightSink]) -> int | None:
    """Return the dimension along which the parts' tensors add up to that of `target`, or None."""
    shapes = Counter(part.shape for part in parts)
    if target.shape is None or any(part.dtypes != target.dtypes for part in parts):
        return None
    for dim, size in enumerate(target.shape):
        total = 0
        for shape, count in shapes.items():
            if shape is None or len(shape) != len(target.shape):
                return None
            rest = shape[:dim] + target.shape[dim : dim + 1] + shape[dim + 1 :]
            # A part that differs in another dimension makes the total too large to match.
            total += count * (shape[dim] if rest == target.shape else size + 1)
        if total == size:
            return dim
    return None
