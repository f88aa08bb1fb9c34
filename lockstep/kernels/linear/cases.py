"""Shapes of linear that every backend must serve: odd sizes, no rows, several tiles, segments; and
packed weights, of which a linear may know no more than that they unpack."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.packed import PackedWeight
from lockstep.kernels.packed.cases import random_weights

SIZES = ((0, 16, 16), (1, 33, 40), (3, 64, 128), (17, 96, 200), (70, 130, 72))
CUT = ((2, 40, 1024, 2), (20, 48, 1024, 4))
PACKED = ((3, 40, 256, 2), (20, 33, 200, 1))
"""Tokens, outputs, inputs, segments."""


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for t, n, k, segments in (*((*size, 1) for size in SIZES), *CUT):
        x = torch.randn(t, k, generator=generator).to(dtype)
        weight = torch.randn(n, k, generator=generator).to(dtype)
        yield f"{t}x{n}x{k}/{segments}", dict(x=x, weight=weight, segments=segments)
    for t, n, k, segments in PACKED:
        x = torch.randn(t, k, generator=generator).to(dtype)
        for name, packed in random_weights(n, k):
            arguments = dict(x=x, weight=packed, segments=segments)
            yield f"{name} {t}x{n}x{k}/{segments}", arguments


def linear_traits(x: Tensor, weight: Tensor | PackedWeight, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    packed = type(weight).__name__ if isinstance(weight, PackedWeight) else ""
    return dict(n=weight.shape[0], k=weight.shape[1], packed=packed)
