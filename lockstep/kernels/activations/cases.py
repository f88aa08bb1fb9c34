"""Test cases of silu_mul and relu2: odd widths, several blocks, no rows."""

from collections.abc import Iterator
from typing import Any

import torch

SHAPES = ((0, 8), (1, 33), (5, 48), (3, 2500))


def silu_mul_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of silu_mul: some gates are large, NaN between rows."""
    generator = torch.Generator().manual_seed(4)
    for tokens, inner in SHAPES:
        gate_up = torch.randn(tokens, 2 * inner, generator=generator) * 4
        gate_up[:, :inner:7] *= 25
        padding = torch.full((tokens, 3), float("nan"))
        gate_up = torch.cat([gate_up, padding], 1).to(dtype)[:, : 2 * inner]
        yield f"{tokens}x{inner}", dict(gate_up=gate_up)


def relu2_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of relu2, with NaN between rows."""
    generator = torch.Generator().manual_seed(5)
    for tokens, inner in SHAPES:
        x = torch.randn(tokens, inner, generator=generator) * 4
        padding = torch.full((tokens, 3), float("nan"))
        yield f"{tokens}x{inner}", dict(x=torch.cat([x, padding], 1).to(dtype)[:, :inner])
