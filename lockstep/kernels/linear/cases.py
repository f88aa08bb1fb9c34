"""Shapes of linear that every backend must serve: odd sizes, no rows, several tiles, split_k; a
weight in fp32; and packed weights, of which a linear may know no more than that they unpack."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.cases import random_weights

SIZES = ((0, 16, 16), (1, 33, 40), (3, 64, 128), (17, 96, 200), (70, 130, 72))
CUT = ((2, 40, 1024, 2), (20, 48, 1024, 4), (5, 24, 1152, 2))
FLOAT = (19, 40, 336, 2)
PACKED = ((3, 40, 256, 2), (20, 33, 200, 1), (9, 24, 1152, 2))
"""Tokens, outputs, inputs, split_k: 1,152 columns are 9 blocks, of which 5 are the first run."""


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    plain = [(*size, 1, dtype) for size in SIZES]
    plain += [(*size, dtype) for size in CUT]
    for t, n, k, split_k, kept in (*plain, (*FLOAT, torch.float32)):
        x = torch.randn(t, k, generator=generator).to(dtype)
        weight = torch.randn(n, k, generator=generator).to(kept)
        yield f"{t}x{n}x{k}/{split_k}", dict(x=x, weight=weight, split_k=split_k)
    for t, n, k, split_k in PACKED:
        x = torch.randn(t, k, generator=generator).to(dtype)
        for name, packed in random_weights(n, k):
            arguments = dict(x=x, weight=packed, split_k=split_k)
            yield f"{name} {t}x{n}x{k}/{split_k}", arguments


def linear_traits(x: Tensor, weight: Tensor | QuantizedWeight, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    (n, k) = weight.shape
    if isinstance(weight, QuantizedWeight):
        return dict(n=n, k=k, quantized=type(weight).__name__)
    return dict(n=n, k=k, quantized="", dtype=weight.dtype)
