"""Buffers between canaries: what a kernel writes outside of its tensors shows, what it forgets too.

A margin of 0xFF bytes, NaN to a float and -1 to an integer, stands before and behind every buffer,
those that an op makes for its results among them, and fills what is made empty.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MARGIN = 4096
aten = torch.ops.aten
MAKES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
FILLS = (
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
)


class Canaries(TorchDispatchMode):
    """While active, every new buffer stands between margins; broken() looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MAKES:
            return self.between(out, filled=False)
        return self.between(out) if func in FILLS else out

    def between(self, x: Tensor, filled: bool = True) -> Tensor:
        """A tensor like x, in a buffer of its own between margins; `filled` with x's storage."""
        size = x.untyped_storage().nbytes()
        whole = torch.full((2 * MARGIN + size,), 255, dtype=torch.uint8, device=x.device)
        self.buffers.append((whole, size))
        if filled:
            own = torch.empty(0, dtype=torch.uint8, device=x.device)
            whole[MARGIN : MARGIN + size] = own.set_(x.untyped_storage())
        shift = MARGIN // x.element_size()
        flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(whole.untyped_storage())
        return flat.as_strided(x.shape, x.stride(), x.storage_offset() + shift)

    def broken(self) -> list[int]:
        """Bytes of the buffers whose margins were written to."""
        return [
            size
            for whole, size in self.buffers
            if int(whole[:MARGIN].min()) < 255 or int(whole[MARGIN + size :].min()) < 255
        ]
