"""Quantized weights that every backend must serve: formats, odd sizes, partial groups, g_idx."""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.formats.weights import (
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    IntWeight,
    QuantizedWeight,
)

SIZES = ((40, 256), (33, 200))
"""(N, K); the second is a multiple of neither K_BLOCK nor a group."""
GGUF = ("Q2_K", "Q3_K", "Q4_1", "Q4_K", "Q5_1", "Q6_K", "IQ4_XS", "MXFP4")
"""GGUF types that differ in how they are stored."""
WHOLE = ("int4", "fp8 by blocks", "nvfp4", "Q4_K", "Q6_K")
"""Formats that are run at the first size; the second size has all of them."""


def layouts(n: int, k: int) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield (name, an unfilled weight [n, k]) in each format that checkpoints have."""
    half = torch.float16
    yield "int4", IntWeight.empty(n, k)
    yield "int4 asymmetric", IntWeight.empty(n, k, zeros=True, scale_dtype=half)
    yield "int4 by 32", IntWeight.empty(n, k, group=32, scale_dtype=half)
    yield "int4 wide", IntWeight.empty(n, k, group=64, zeros=True, scale_dtype=torch.float32)
    yield "int4 desc_act", IntWeight.empty(n, k, zeros=True, g_idx=True, scale_dtype=half)
    yield "int4 by 48", IntWeight.empty(n, k, group=48)
    yield "int8", IntWeight.empty(n, k, bits=8, group=-1)
    yield "int8 by 16", IntWeight.empty(n, k, bits=8, group=16, zeros=True)
    yield "fp8 by blocks", Fp8Weight.empty(n, k, 128, 128)
    yield "fp8 by outputs", Fp8Weight.empty(n, k, 1, k)
    yield "fp8", Fp8Weight.empty(n, k, n, k)
    yield "nvfp4", Fp4Weight.empty(n, k)
    for kind in GGUF:
        yield kind, GgufWeight.empty(n, k, kind)


def random_weights(n: int, k: int, seed: int = 0) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the weights of `layouts`, filled; g_idx is in random order."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in layouts(n, k):
        weight.fill_dummy(generator)
        if isinstance(weight, IntWeight) and weight.g_idx is not None:
            order = torch.randperm(k, generator=generator)
            weight.g_idx.copy_(weight.g_idx[order])
        yield name, weight


def dequantize_weight_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of dequantize_weight on the CPU)."""
    for n, k in SIZES:
        for name, weight in random_weights(n, k):
            if k % 128 == 0 and name not in WHOLE:
                continue
            yield f"{name} {n}x{k}", dict(weight=weight, out=torch.zeros(n, k, dtype=dtype))
