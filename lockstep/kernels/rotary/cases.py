"""Batches of rope_and_cache for every backend. What no one may read is NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, KVFormat, codecs_of
from lockstep.kernels.formats.kv.cases import NAMED, empty_cache, fits

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
"""(tokens, heads, KV heads, head dim, rotary width, gated, offset); the last token is null."""
WITHOUT = (
    ((5, 4, 2, 32, 32, False, 0.0), ("q_weight", "k_weight")),
    ((3, 5, 1, 80, 40, True, 0.0), ("q_weight", "k_weight")),
    ((4, 3, 3, 24, 24, False, 1.0), ("cos", "sin")),
    ((6, 4, 2, 32, 32, True, 0.0), ("q_weight", "k_weight", "cos", "sin")),
)
"""(layer as above, arguments that are None): no norm, no positions, neither."""
PAGES = 12
PAGE_SIZE = 16
POSITIONS = 500


def beside_nan(x: Tensor) -> Tensor:
    """The same numbers as a view of wider rows whose other columns are NaN."""
    beside = torch.full((*x.shape[:-1], 5), float("nan"), dtype=x.dtype)
    return torch.cat([x, beside], -1)[..., : x.shape[-1]]


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
    """Arguments of rope_and_cache: tokens in random slots of caches that are NaN elsewhere. format:
    of the caches, None where they are of the dtype."""
    generator = torch.Generator().manual_seed(dim)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = torch.randn(POSITIONS, width // 2, generator=generator) * 3
    slots = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:tokens] + PAGE_SIZE
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    slots[tokens - 1 :] = 0
    positions[tokens - 1 :] = 0
    shape = (PAGES, PAGE_SIZE, kv_heads, dim)
    k_cache, v_cache = empty_cache(shape, dtype, format)
    return dict(
        qkv=beside_nan(numbers(tokens, (heads * (1 + gated) + 2 * kv_heads) * dim)),
        q_weight=numbers(dim),
        k_weight=numbers(dim),
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
    """(name, arguments of rope_and_cache on the CPU)."""
    for layer in LAYERS:
        yield str(layer), rope(*layer, dtype)
    for layer, absent in WITHOUT:
        yield f"{layer} without {', '.join(absent)}", rope(*layer, dtype) | dict.fromkeys(absent)
    for name, format in NAMED.items():
        for layer in LAYERS:
            if fits(format, layer[3]):
                yield f"{name}, {layer}", rope(*layer, dtype, format)
        layer, absent = WITHOUT[0]
        yield f"{name} without norm", rope(*layer, dtype, format) | dict.fromkeys(absent)
        layer, absent = WITHOUT[2]
        if not fits(format, layer[3]):
            layer = (4, 3, 3, 64, 64, False, 1.0)
        yield f"{name} without positions", rope(*layer, dtype, format) | dict.fromkeys(absent)


def rope_and_cache_traits(k_cache: KVCache, v_cache: KVCache, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    return dict(head_dim=k_cache.shape[3], codecs=codecs_of(k_cache, v_cache))
