"""Test cases of the norms: odd widths, strided heads, no rows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SHAPES = ((0, 8), (1, 80), (5, 33), (3, 2560), (4, 3, 64), (2, 5, 128))


def rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of rms_norm; the last case is a strided view."""
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        weight = torch.randn(shape[-1], generator=generator).to(dtype)
        x = torch.randn(shape, generator=generator).to(dtype)
        offset = float(len(shape) == 3)
        name = "x".join(map(str, shape))
        yield name, dict(x=x, weight=weight, eps=1e-6, offset=offset)
    x = torch.randn(4, 3, 96, generator=generator).to(dtype)[..., :48]
    yield "strided", dict(x=x, weight=torch.ones(48, dtype=dtype), eps=1e-6, offset=1.0)


def add_rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of add_rms_norm.

    Deltas are strided, with NaN between rows. Each case is repeated with split-K partials.
    """
    generator = torch.Generator().manual_seed(3)
    for name, arguments in rms_norm_cases(dtype):
        x = arguments["x"]
        delta = torch.randn(x.shape, generator=generator).to(dtype)
        padding = torch.full((*x.shape[:-1], 5), float("nan"), dtype=dtype)
        delta = torch.cat([delta, padding], -1)[..., : x.shape[-1]]
        yield name, dict(arguments, delta=delta)
        parts = torch.randn(2, *x.shape, generator=generator)
        yield f"{name} in parts", dict(arguments, delta=parts)


def gated_rms_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of gated_rms_norm, with the gate a slice."""
    generator = torch.Generator().manual_seed(2)
    for tokens, heads, width in ((0, 2, 16), (1, 3, 24), (5, 4, 128)):
        x = torch.randn(tokens, heads, width, generator=generator)
        fused = torch.randn(tokens, heads * width + 7, generator=generator).to(dtype)
        gate = fused[:, : heads * width].unflatten(1, (heads, width))
        weight = torch.randn(width, generator=generator).to(dtype)
        yield f"{tokens}x{heads}x{width}", dict(x=x, gate=gate, weight=weight, eps=1e-6)


def gated_group_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of gated_group_norm, with the gate a slice."""
    generator = torch.Generator().manual_seed(5)
    for tokens, groups, width in ((0, 2, 16), (1, 3, 24), (5, 2, 80), (3, 1, 1200)):
        x = torch.randn(tokens, groups, width, generator=generator)
        fused = torch.randn(tokens, groups * width + 7, generator=generator).to(dtype)
        gate = fused[:, : groups * width].unflatten(1, (groups, width))
        weight = torch.randn(groups, width, generator=generator).to(dtype)
        yield f"{tokens}x{groups}x{width}", dict(x=x, gate=gate, weight=weight, eps=1e-5)


def rms_norm_traits(x: Tensor, **rest: Any) -> dict[str, Any]:
    """Return the traits with which a layer of these arguments chooses a backend."""
    return dict(width=x.shape[-1])


add_rms_norm_traits = rms_norm_traits
gated_rms_norm_traits = rms_norm_traits
gated_group_norm_traits = rms_norm_traits
