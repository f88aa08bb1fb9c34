"""Cases of fp8_linear, quantize_rows and its fused forms for every backend.

Odd sizes, no rows, several tiles, split-K, each kind of scale; a row of zeros and a row of tiny
values. The columns past a row's end are NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.weights import Fp8Weight

SIZES = (
    (3, 40, 256, 1),
    (17, 33, 200, 1),
    (0, 16, 128, 1),
    (1, 70, 40, 1),
    (70, 130, 384, 1),
    (5, 24, 1152, 2),
    (9, 48, 2048, 4),
)
"""(tokens, N, K, split_k): 1,152 columns are 9 blocks, of which the first partition takes 5."""
SCALES = ("block", "output", "tensor")
PADDING = 8
"""Unread columns after each row: x is a view of wider rows."""


def rows_of(tokens: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random rows [tokens, k] of different magnitudes, a view of rows that end in NaN.

    Of several rows the second is zero, and the third has the smallest normal numbers of its dtype.
    """
    wide = torch.full((tokens, k + PADDING), float("nan"), dtype=dtype)
    magnitudes = torch.exp2(torch.randint(-6, 7, (tokens, 1), generator=generator).float())
    wide[:, :k] = torch.randn(tokens, k, generator=generator) * magnitudes
    wide[1:2, :k] = 0.0
    wide[2:3, :k] = torch.finfo(dtype).smallest_normal
    return wide[:, :k]


def quantize_rows_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of quantize_rows on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for tokens, _, k, _ in SIZES:
        # A scale per row first: the first case of fp8_linear launches the kernel for blocks.
        for block_k in (k, 128):
            x = rows_of(tokens, k, dtype, generator)
            yield f"{tokens}x{k} by {block_k}", dict(x=x, block_k=block_k)


def quantize_silu_mul_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of quantize_silu_mul on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for tokens, _, inner, _ in SIZES:
        gate_up = rows_of(tokens, 2 * inner, dtype, generator)
        yield f"{tokens}x{inner}", dict(gate_up=gate_up)


def quantize_add_rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of quantize_add_rms_norm on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for tokens, _, width, parts in SIZES:
        x, delta = (rows_of(tokens, width, dtype, generator) for _ in range(2))
        weight = torch.randn(width, generator=generator).to(dtype)
        if parts > 1:
            delta = torch.randn(parts, tokens, width, generator=generator)
        arguments = dict(x=x, delta=delta, weight=weight, eps=1e-6, offset=float(parts > 1))
        for keeps_norm in (False, True):
            name = f"{tokens}x{width}, {parts} partials{', keeps its norm' * keeps_norm}"
            yield name, arguments | dict(keeps_norm=keeps_norm)


def quantize_add_rms_norm_traits(x: Tensor, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with such arguments chooses a backend."""
    return dict(width=x.shape[-1])


def fp8_linear_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of fp8_linear on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    for tokens, n, k, split_k in SIZES:
        for kind in SCALES:
            sizes = dict(block=(128, 128), output=(1, k), tensor=(n, k))[kind]
            weight = Fp8Weight.empty(n, k, *sizes)
            weight.fill_dummy(generator)
            x = rows_of(tokens, k, dtype, generator)
            name = f"{tokens}x{n}x{k}/{split_k} by {kind}"
            yield name, dict(x=x, weight=weight, split_k=split_k)


def fp8_linear_traits(x: Tensor, weight: Fp8Weight, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with such arguments chooses a backend."""
    n, k = weight.shape
    return dict(n=n, k=k, quantized=type(weight).__name__)
