"""Batches of the latent ops for every backend. Values that no row may read are NaN."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention.cases import DECODE, ODD, RAGGED, VERIFY, WIDE, Row, page_rows
from lockstep.kernels.formats.kv import KVCache, KVQuantizer, quantizers_of, write_slots
from lockstep.kernels.formats.kv.cases import LATENT_QUANTIZERS, empty_side
from lockstep.kernels.rotary.cases import PAGE_SIZE, PAGES, POSITIONS, view_beside_nan

BATCHES: tuple[tuple[tuple[Row, ...], int, int, int, int], ...] = (
    (DECODE, 4, 32, 16, 16),
    (ODD, 7, 24, 8, 16),
    (VERIFY, 5, 40, 12, 64),
    (RAGGED, 3, 64, 16, 32),
    (VERIFY, 16, 128, 64, 64),
    (((0, 3), (0, 0), (2047, 2)), 4, 16, 16, 64),
    (((2300, 1), (30, 4)), 2, 48, 16, 16),
    (WIDE, 5, 40, 12, 64),
    (VERIFY, 3, 512, 64, 64),
)
"""(rows, heads, latent, rope, page size)."""
QUANTIZED: tuple[tuple[tuple[Row, ...], int, int, int, int], ...] = (
    (((5, 4), (0, 0), (254, 3)), 3, 64, 16, 64),
    (((5, 4), (300, 1)), 2, 40, 12, 16),
    (((0, 9), (250, 9)), 2, 32, 8, 16),
)
"""Batches for every quantizer that stores the latent."""
LAYERS = (
    (5, 4, 12, 32, 8),
    (1, 3, 16, 80, 40),
    (4, 7, 5, 24, 24),
    (0, 2, 8, 16, 4),
    (6, 16, 128, 512, 64),
    (3, 0, 16, 48, 16),
)
"""(tokens, heads, dims of a head that are not rotated, latent, rope). The last token is null."""
QUANTIZED_LAYERS = (
    (5, 4, 12, 32, 8),
    (4, 1, 16, 512, 64),
    (3, 0, 16, 40, 16),
)
"""Layers for every quantizer that stores the latent."""


def paged_latents(
    rows: tuple[Row, ...],
    heads: int,
    latent: int,
    rope: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    min_columns: int = 0,
    quantizer: KVQuantizer | None = None,
) -> dict[str, Any]:
    """Return arguments of latent_attention: pages in random order, everything unwritten NaN.

    quantizer: of the latents, None where they are of the dtype. min_columns: minimum columns of the
    page table.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_pages, slots_of_rows, metadata = page_rows(rows, page_size, min_columns, generator)
    latents = empty_side((num_pages, page_size, latent), dtype, quantizer)
    ropes = torch.full((num_pages, page_size, rope), torch.nan, dtype=dtype)
    for slots in slots_of_rows:
        write_slots(latents, slots, random(len(slots), latent))
        write_slots(ropes, slots, random(len(slots), rope))
    tokens = sum(count for _, count in rows)
    return dict(
        q_latent=random(tokens, heads, latent),
        q_rope=random(tokens, heads, rope),
        latents=latents,
        ropes=ropes,
        **metadata,
        scale=(latent + rope) ** -0.5,
    )


def latent_attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of latent_attention on the CPU)."""
    for i, (rows, heads, latent, rope, page_size) in enumerate(BATCHES):
        name = f"{len(rows)} rows, {heads} heads, {latent} + {rope}, page {page_size}"
        yield name, paged_latents(rows, heads, latent, rope, page_size, dtype, seed=i)
    for i, (kind, batch) in enumerate(product(LATENT_QUANTIZERS, QUANTIZED)):
        quantizer = LATENT_QUANTIZERS[kind]
        if not quantizer.unsupported_reason(batch[2]):
            yield f"{kind}, {batch}", paged_latents(*batch, dtype, seed=i, quantizer=quantizer)


def latent_attention_traits(
    q_latent: Tensor, q_rope: Tensor, latents: KVCache, **rest: Any
) -> dict[str, Any]:
    """Return the traits by which a layer with these arguments chooses a backend."""
    sizes = dict(heads=q_latent.shape[1], latent=q_latent.shape[2], rope=q_rope.shape[2])
    return sizes | dict(quantizers=quantizers_of(latents))


def latent_rope(
    tokens: int,
    heads: int,
    nope: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    quantizer: KVQuantizer | None = None,
) -> dict[str, Any]:
    """Return arguments of latent_rope_and_cache: tokens in random slots of caches that are NaN
    elsewhere.

    quantizer: of the latents, None where they are of the dtype.
    """
    generator = torch.Generator().manual_seed(latent)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = torch.randn(POSITIONS, rope // 2, generator=generator) * 3
    slots = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:tokens] + PAGE_SIZE
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    slots[tokens - 1 :] = 0
    positions[tokens - 1 :] = 0
    q = view_beside_nan(random(tokens, heads * (nope + rope)))
    return dict(
        q=q.unflatten(1, (heads, nope + rope)),
        kv=view_beside_nan(random(tokens, latent + rope)),
        weight=random(latent),
        cos=angles.cos(),
        sin=angles.sin(),
        positions=positions,
        slot_mapping=slots,
        latents=empty_side((PAGES, PAGE_SIZE, latent), dtype, quantizer),
        ropes=torch.full((PAGES, PAGE_SIZE, rope), torch.nan, dtype=dtype),
        eps=1e-6,
    )


def latent_rope_and_cache_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of latent_rope_and_cache on the CPU)."""
    for layer in LAYERS:
        yield str(layer), latent_rope(*layer, dtype)
    for kind, layer in product(LATENT_QUANTIZERS, QUANTIZED_LAYERS):
        quantizer = LATENT_QUANTIZERS[kind]
        if not quantizer.unsupported_reason(layer[3]):
            yield f"{kind}, {layer}", latent_rope(*layer, dtype, quantizer)


def latent_rope_and_cache_traits(latents: KVCache, ropes: Tensor, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with these arguments chooses a backend."""
    return dict(latent=latents.shape[2], rope=ropes.shape[2], quantizers=quantizers_of(latents))
