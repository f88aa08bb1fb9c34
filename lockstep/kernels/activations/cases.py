"""Shapes of silu_mul and relu2 that every backend must serve: odd widths, several blocks, none."""

from collections.abc import Iterator
from typing import Any

import torch

SHAPES = ((0, 8), (1, 33), (5, 48), (3, 2500))


def silu_mul_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of silu_mul on the CPU): large gates among them, NaN beside every row."""
    generator = torch.Generator().manual_seed(4)
    for tokens, inner in SHAPES:
        gate_up = torch.randn(tokens, 2 * inner, generator=generator) * 4
        gate_up[:, :inner:7] *= 25
        beside = torch.full((tokens, 3), float("nan"))
        gate_up = torch.cat([gate_up, beside], 1).to(dtype)[:, : 2 * inner]
        yield f"{tokens}x{inner}", dict(gate_up=gate_up)


def relu2_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of relu2 on the CPU): NaN beside every row."""
    generator = torch.Generator().manual_seed(5)
    for tokens, inner in SHAPES:
        x = torch.randn(tokens, inner, generator=generator) * 4
        beside = torch.full((tokens, 3), float("nan"))
        yield f"{tokens}x{inner}", dict(x=torch.cat([x, beside], 1).to(dtype)[:, :inner])
