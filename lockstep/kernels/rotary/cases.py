"""Batches of rope_and_cache for every backend. Values that no one may read are NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, KVFormat, quantizers_of
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS, empty_cache, fits

LAYERS = (
    (5, 4, 2, 32, 8, True, 1.0),
    (1, 3, 1, 80, 40, False, 0.0),
    (4, 5, 5, 24, 24, False, 1.0),
    (0, 2, 1, 16, 4, True, 1.0),
    (6, 16, 2, 256, 64, True, 1.0),
    (3, 8, 2, 128, 128, False, 0.0),
    (2, 5, 3, 256, 64, False, 1.0),
    (5, 0, 2, 32, 8, True, 1.0),
)
"""(tokens, query heads, KV heads, head dim, rotary width, gated, offset). The last token is null.
"""
WITHOUT = (
    ((5, 4, 2, 32, 32, False, 0.0), ("q_weight", "k_weight")),
    ((3, 5, 1, 80, 40, True, 0.0), ("q_weight", "k_weight")),
    ((4, 3, 3, 24, 24, False, 1.0), ("cos", "sin")),
    ((6, 4, 2, 32, 32, True, 0.0), ("q_weight", "k_weight", "cos", "sin")),
)
"""(layer, arguments that are None): no norm, no rotary embedding, neither."""
PAGES = 12
PAGE_SIZE = 16
POSITIONS = 500


def view_beside_nan(x: Tensor) -> Tensor:
    """Return the same numbers as a view of wider rows whose other columns are NaN."""
    nan_columns = torch.full((*x.shape[:-1], 5), float("nan"), dtype=x.dtype)
    return torch.cat([x, nan_columns], -1)[..., : x.shape[-1]]


def rope(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    gated: bool,
    offset: float,
    dtype: torch.dtype,
    format: KVFormat | None = None,
) -> dict[str, Any]:
    """Return arguments of rope_and_cache: tokens in random slots of caches that are NaN elsewhere.

    format: of the caches, None where they are of the dtype.
    """
    generator = torch.Generator().manual_seed(dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = torch.randn(POSITIONS, width // 2, generator=generator) * 3
    slots = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:tokens] + PAGE_SIZE
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    slots[tokens - 1 :] = 0
    positions[tokens - 1 :] = 0
    shape = (PAGES, PAGE_SIZE, kv_heads, dim)
    k_cache, v_cache = empty_cache(shape, dtype, format)
    return dict(
        qkv=view_beside_nan(random(tokens, (heads * (1 + gated) + 2 * kv_heads) * dim)),
        q_weight=random(dim),
        k_weight=random(dim),
        cos=angles.cos(),
        sin=angles.sin(),
        positions=positions,
        slot_mapping=slots,
        k_cache=k_cache,
        v_cache=v_cache,
        eps=1e-6,
        offset=offset,
        gated=gated,
    )


def rope_and_cache_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of rope_and_cache on the CPU)."""
    for layer in LAYERS:
        yield str(layer), rope(*layer, dtype)
    for layer, none_arguments in WITHOUT:
        yield (
            f"{layer} without {', '.join(none_arguments)}",
            rope(*layer, dtype) | dict.fromkeys(none_arguments),
        )
    for name, format in KERNEL_FORMATS.items():
        for layer in LAYERS:
            if fits(format, layer[3]):
                yield f"{name}, {layer}", rope(*layer, dtype, format)
        layer, none_arguments = WITHOUT[0]
        yield f"{name} without norm", rope(*layer, dtype, format) | dict.fromkeys(none_arguments)
        layer, none_arguments = WITHOUT[2]
        if not fits(format, layer[3]):
            layer = (4, 3, 3, 64, 64, False, 1.0)
        yield (
            f"{name} without positions",
            rope(*layer, dtype, format) | dict.fromkeys(none_arguments),
        )


def rope_and_cache_traits(k_cache: KVCache, v_cache: KVCache, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with these arguments chooses a backend."""
    return dict(head_dim=k_cache.shape[3], quantizers=quantizers_of(k_cache, v_cache))
