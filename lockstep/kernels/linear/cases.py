"""Shapes of linear that every backend must serve: odd sizes, no rows, several tiles, segments."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SIZES = ((0, 16, 16), (1, 33, 40), (3, 64, 128), (17, 96, 200), (70, 130, 72))
CUT = ((2, 40, 1024, 2), (20, 48, 1024, 4))


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for t, n, k, segments in (*((*size, 1) for size in SIZES), *CUT):
        x = torch.randn(t, k, generator=generator).to(dtype)
        weight = torch.randn(n, k, generator=generator).to(dtype)
        yield f"{t}x{n}x{k}/{segments}", dict(x=x, weight=weight, segments=segments)


def linear_traits(x: Tensor, weight: Tensor, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    return dict(n=weight.shape[0], k=weight.shape[1])
