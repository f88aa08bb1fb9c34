"""Cases of head_linear for every backend."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SIZES = (
    (1, 1, 16, 8),
    (5, 3, 24, 40),
    (33, 2, 12, 20),
    (70, 5, 64, 32),
    (4, 2, 128, 512),
    (3, 2, 512, 128),
    (0, 2, 16, 16),
)
"""(tokens, heads, inputs, outputs)."""
PADDING = 6
"""Unread columns after each head's row: x is a view of wider rows."""


def head_linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of head_linear on the CPU); unread columns of x are NaN."""
    for tokens, heads, inputs, outputs in SIZES:
        generator = torch.Generator().manual_seed(inputs + outputs)

        def numbers(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        wide = torch.full((tokens, heads, inputs + PADDING), float("nan"), dtype=dtype)
        wide[..., :inputs] = numbers(tokens, heads, inputs)
        weight = numbers(heads, outputs, inputs) * inputs**-0.5
        yield f"{tokens}x{heads}x{inputs} -> {outputs}", dict(x=wide[..., :inputs], weight=weight)


def head_linear_traits(x: Tensor, weight: Tensor) -> dict[str, Any]:
    """Return the traits by which a layer with such arguments chooses a backend."""
    return dict(inputs=weight.shape[2], outputs=weight.shape[1])
