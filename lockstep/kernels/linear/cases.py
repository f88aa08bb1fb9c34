"""Shapes of linear that every backend must serve: odd sizes, no rows, one row, several tiles."""

from collections.abc import Iterator
from typing import Any

import torch

SIZES = ((0, 16, 16), (1, 33, 40), (3, 64, 128), (17, 96, 200), (70, 130, 72))


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for t, n, k in SIZES:
        x = torch.randn(t, k, generator=generator).to(dtype)
        weight = torch.randn(n, k, generator=generator).to(dtype)
        yield f"{t}x{n}x{k}", dict(x=x, weight=weight)
