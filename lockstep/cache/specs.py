"""What a layer needs from the cache, and the tensors it gets. Nobody else computes bytes."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedSpec:
    """Keys and values of one attention layer: kv_heads x head_dim each, per token."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of this layer."""
        return 2 * page_size * self.kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int, device: str) -> tuple[Tensor, Tensor]:
        """k and v, each [pages, page_size, Hkv, D], zeroed."""
        shape = (num_pages, page_size, self.kv_heads, self.head_dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
        return k, v


@dataclass(frozen=True)
class StateSpec:
    """Recurrent state of one layer: named parts of fixed shape per slot."""

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this layer."""
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in self.parts)

    def allocate(self, num_slots: int, device: str) -> dict[str, Tensor]:
        """Part name -> [slots, *shape], zeroed."""
        return {
            name: torch.zeros((num_slots, *shape), dtype=dtype, device=device)
            for name, shape, dtype in self.parts
        }


class Cached(Protocol):
    """A mixer that keeps something between steps."""

    def cache_spec(self) -> PagedSpec | StateSpec:
        """What this layer needs."""
        ...

    def bind(self, storage: object) -> None:
        """Hands the layer the tensors that its spec allocated."""
        ...

    def cache_tensors(self) -> list[Tensor]:
        """The bound tensors, each indexed by page or slot first."""
        ...
