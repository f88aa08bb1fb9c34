"""Storage that a layer needs from the cache, and the tensors that it gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol, TypeGuard

import torch
from torch import Tensor


class StorageKind(Enum):
    """Storage kind: PAGED grows with every token, in pages; STATE has a fixed size, in slots."""

    PAGED = "paged"
    STATE = "state"


@dataclass(frozen=True)
class Part:
    """Tensor of a layer.

    shape: per token for PAGED, per slot for STATE. is_history: a circular history buffer with one
    line per token; a step touches only the lines of the step's tokens.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_history: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of one token, or of one slot."""
        return prod(self.shape) * self.dtype.itemsize

    def touched(self, query_len: int) -> int:
        """Return the bytes of one slot that a step of `query_len` tokens reads and writes."""
        if not self.is_history:
            return self.nbytes
        lines = self.shape[0]  # history lines, one per token
        return self.nbytes // lines * min(query_len, lines)


@dataclass(frozen=True)
class Spec:
    """Storage of one layer: parts of one storage kind. The mixer declares it."""

    kind: StorageKind
    parts: tuple[Part, ...]

    def unit_bytes(self, page_size: int) -> int:
        """Return the bytes of one page of this layer, or of one slot."""
        return prod(self._line(page_size)) * sum(part.nbytes for part in self.parts)

    def step_bytes(self, query_len: int) -> int:
        """Return the bytes of one row's state that a step of `query_len` tokens reads and
        writes.
        """
        return sum(part.touched(query_len) for part in self.parts)

    def allocate(self, units: int, page_size: int, device: str) -> dict[str, Tensor]:
        """Allocate zeroed tensors: part name -> [pages, page_size, *shape] or [slots, *shape]."""
        lead = (units, *self._line(page_size))
        return {
            part.name: torch.zeros((*lead, *part.shape), dtype=part.dtype, device=device)
            for part in self.parts
        }

    def _line(self, page_size: int) -> tuple[int, ...]:
        """Return the dimensions between the unit and a part's own shape."""
        return (page_size,) if self.kind is StorageKind.PAGED else ()


def unit_bytes(specs: Sequence[Spec], kind: StorageKind, page_size: int) -> int:
    """Return the bytes of one page, or of one slot, summed over the specs of this kind."""
    return sum(spec.unit_bytes(page_size) for spec in specs if spec.kind is kind)


class Cached(Protocol):
    """Mixer that keeps data between steps."""

    def cache_spec(self) -> Spec:
        """Return the storage that this layer needs."""
        ...

    def bind(self, storage: dict[str, Tensor]) -> None:
        """Give the layer the tensors of its spec, by part name."""
        ...

    def cache_tensors(self) -> list[Tensor]:
        """Return the bound tensors, each indexed by page or slot first."""
        ...


def is_cached(module: object) -> TypeGuard[Cached]:
    """Return whether a layer keeps data between steps."""
    return hasattr(module, "cache_spec")
