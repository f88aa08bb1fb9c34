"""Cases of linear that every backend must serve.

Odd sizes, no rows, several tiles, split-K; fp32 weights; quantized weights of every format.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.cases import random_weights

SIZES = ((0, 16, 16), (1, 33, 40), (3, 64, 128), (17, 96, 200), (70, 130, 72))
SPLIT = ((2, 40, 1024, 2), (20, 48, 1024, 4), (5, 24, 1152, 2), (3, 40, 2048, 8))
FP32 = (19, 40, 336, 2)
QUANTIZED = ((3, 40, 256, 2), (20, 33, 200, 1), (9, 24, 1152, 2), (1, 70, 288, 1), (9, 70, 288, 1))
"""(tokens, N, K, split_k): 1,152 columns are 9 blocks, of which the first partition takes 5."""


def linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    plain = [(*size, 1, dtype) for size in SIZES]
    plain += [(*size, dtype) for size in SPLIT]
    for t, n, k, split_k, weight_dtype in (*plain, (*FP32, torch.float32)):
        x = torch.randn(t, k, generator=generator).to(dtype)
        weight = torch.randn(n, k, generator=generator).to(weight_dtype)
        yield f"{t}x{n}x{k}/{split_k}", dict(x=x, weight=weight, split_k=split_k)
    for t, n, k, split_k in QUANTIZED:
        x = torch.randn(t, k, generator=generator).to(dtype)
        for name, quantized in random_weights(n, k):
            arguments = dict(x=x, weight=quantized, split_k=split_k)
            yield f"{name} {t}x{n}x{k}/{split_k}", arguments


def linear_traits(x: Tensor, weight: Tensor | QuantizedWeight, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with such arguments chooses a backend."""
    (n, k) = weight.shape
    if isinstance(weight, QuantizedWeight):
        return dict(n=n, k=k, quantized=type(weight).__name__)
    return dict(n=n, k=k, quantized="", dtype=weight.dtype)
