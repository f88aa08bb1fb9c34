"""Buffers between canaries, which show what a kernel writes outside of its tensors and what it
leaves unwritten.

A margin of 0xFF bytes (NaN as a float, -1 as an integer) is on both sides of every buffer,
including those that an op allocates for its results.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MARGIN = 4096
aten = torch.ops.aten
EMPTY_ALLOCATIONS = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
FILLED_ALLOCATIONS = (
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
)


class Canaries(TorchDispatchMode):
    """Dispatch mode that puts every new buffer between margins.

    fill: byte of empty allocations.
    """

    def __init__(self, fill: int = 255) -> None:
        super().__init__()
        self.fill = fill
        self.buffers: list[tuple[Tensor, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler at the first call, which takes 0.95 s.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in EMPTY_ALLOCATIONS:
            return self.add_margins(out, filled=False)
        return self.add_margins(out) if func in FILLED_ALLOCATIONS else out

    def add_margins(self, x: Tensor, filled: bool = True) -> Tensor:
        """Return a tensor like x in a new buffer with a margin on each side.

        filled: with x's values, else with the fill byte.
        """
        size = x.untyped_storage().nbytes()
        buffer = torch.full((2 * MARGIN + size,), 255, dtype=torch.uint8, device=x.device)
        self.buffers.append((buffer, size))
        inside = buffer[MARGIN : MARGIN + size]
        if filled:
            mine = torch.empty(0, dtype=torch.uint8, device=x.device)
            inside.copy_(mine.set_(x.untyped_storage()))
        else:
            inside.fill_(self.fill)
        shift = MARGIN // x.element_size()
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(buffer.untyped_storage())
        return flat.as_strided(x.shape, x.stride(), x.storage_offset() + shift)

    def overwritten(self) -> list[int]:
        """Return the bytes of the buffers whose margins were overwritten."""
        return [
            size
            for buffer, size in self.buffers
            if int(buffer[:MARGIN].min()) < 255 or int(buffer[MARGIN + size :].min()) < 255
        ]
