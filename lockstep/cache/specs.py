"""What a layer needs from the cache, and the tensors it gets. Nobody else computes bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Protocol, TypeGuard

import torch
from torch import Tensor


class Law(Enum):
    """How what is kept grows: PAGED, with every token, in pages; STATE, not at all, in slots."""

    PAGED = "paged"
    STATE = "state"


@dataclass(frozen=True)
class Part:
    """One tensor of a layer. shape: per token where the law is PAGED, per slot where it is STATE.

    ring: of a state, lines by token, of which a step touches those of its window only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ring: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one token, or of one slot."""
        return prod(self.shape) * self.dtype.itemsize

    def touched(self, query_len: int) -> int:
        """Bytes of one slot that a step of `query_len` tokens reads, and writes."""
        if not self.ring:
            return self.nbytes
        lines = self.shape[0]
        return self.nbytes // lines * min(query_len, lines)


@dataclass(frozen=True)
class Spec:
    """What one layer keeps: parts under a law. The mixer declares it, for KV with its format."""

    law: Law
    parts: tuple[Part, ...]

    def unit_bytes(self, page_size: int) -> int:
        """Bytes of one page of this layer, or of one slot."""
        return prod(self._line(page_size)) * sum(part.nbytes for part in self.parts)

    def step_bytes(self, query_len: int) -> int:
        """Bytes of one row's state that a step of `query_len` tokens reads, and writes."""
        return sum(part.touched(query_len) for part in self.parts)

    def allocate(self, units: int, page_size: int, device: str) -> dict[str, Tensor]:
        """Part name -> [pages, page_size, *shape] or [slots, *shape], zeroed."""
        lead = (units, *self._line(page_size))
        return {
            part.name: torch.zeros((*lead, *part.shape), dtype=part.dtype, device=device)
            for part in self.parts
        }

    def _line(self, page_size: int) -> tuple[int, ...]:
        """What stands between a unit and a part's own shape."""
        return (page_size,) if self.law is Law.PAGED else ()


def unit_bytes(specs: Sequence[Spec], law: Law, page_size: int) -> int:
    """Bytes of one page, or of one slot, over the specs under this law."""
    return sum(spec.unit_bytes(page_size) for spec in specs if spec.law is law)


class Cached(Protocol):
    """A mixer that keeps something between steps."""

    def cache_spec(self) -> Spec:
        """What this layer needs."""
        ...

    def bind(self, storage: dict[str, Tensor]) -> None:
        """Hands the layer the tensors that its spec allocated, by the names of its parts."""
        ...

    def cache_tensors(self) -> list[Tensor]:
        """The bound tensors, each indexed by page or slot first."""
        ...


def is_cached(module: object) -> TypeGuard[Cached]:
    """Whether a layer is such a mixer."""
    return hasattr(module, "cache_spec")
