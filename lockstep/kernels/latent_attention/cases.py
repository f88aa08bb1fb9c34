"""Batches of the latent ops that every backend must serve. What no one may read is NaN."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention.cases import DECODE, ODD, RAGGED, VERIFY, WIDE, Row
from lockstep.kernels.formats.kv import Codec, KVCache, codecs_of, write_slots
from lockstep.kernels.formats.kv.cases import LATENTS, empty_side
from lockstep.kernels.rotary.cases import PAGE_SIZE, PAGES, POSITIONS, beside_nan

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
PACKED: tuple[tuple[tuple[Row, ...], int, int, int, int], ...] = (
    (((5, 4), (0, 0), (254, 3)), 3, 64, 16, 64),
    (((5, 4), (300, 1)), 2, 40, 12, 16),
    (((0, 9), (250, 9)), 2, 32, 8, 16),
)
"""As above, in every codec that takes the latent."""
LAYERS = (
    (5, 4, 12, 32, 8),
    (1, 3, 16, 80, 40),
    (4, 7, 5, 24, 24),
    (0, 2, 8, 16, 4),
    (6, 16, 128, 512, 64),
    (3, 0, 16, 48, 16),
)
"""(tokens, heads, dims of a head that do not turn, latent, rope); the last token is null."""
PACKED_LAYERS = (
    (5, 4, 12, 32, 8),
    (4, 1, 16, 512, 64),
    (3, 0, 16, 40, 16),
)
"""As above, in every codec that takes the latent."""


def paged_latents(
    rows: tuple[Row, ...],
    heads: int,
    latent: int,
    rope: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    widest: int = 0,
    codec: Codec | None = None,
) -> dict[str, Any]:
    """Arguments of latent_attention: pages in random order, everything unwritten NaN.

    codec: of the latents, None where they are of the dtype. widest: columns of the page table at
    least (the tokens that a row could have at most).
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [start + count for start, count in rows]
    needed = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(needed), generator=generator) + 1
    table = torch.zeros(len(rows), max(*needed, widest, 1), dtype=torch.int32)
    lead = (sum(needed) + 1, page_size)
    latents = empty_side((*lead, latent), dtype, codec)
    ropes = torch.full((*lead, rope), torch.nan, dtype=dtype)
    for s, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        pages = order[:count]
        order = order[count:]
        table[s, :count] = pages.int()
        token = torch.arange(length)
        slots = pages[token // page_size] * page_size + token % page_size
        write_slots(latents, slots, numbers(length, latent))
        write_slots(ropes, slots, numbers(length, rope))
    counts = torch.tensor([0, *(count for _, count in rows)], dtype=torch.int32)
    tokens = int(counts.sum())
    return dict(
        q_latent=numbers(tokens, heads, latent),
        q_rope=numbers(tokens, heads, rope),
        latents=latents,
        ropes=ropes,
        page_table=table,
        cu_seqlens=counts.cumsum(0, dtype=torch.int32),
        starts=torch.tensor([start for start, _ in rows], dtype=torch.int32),
        query_len=max(count for _, count in rows),
        scale=(latent + rope) ** -0.5,
    )


def latent_attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of latent_attention on the CPU)."""
    for i, (rows, heads, latent, rope, page_size) in enumerate(BATCHES):
        name = f"{len(rows)} rows, {heads} heads, {latent} + {rope}, page {page_size}"
        yield name, paged_latents(rows, heads, latent, rope, page_size, dtype, seed=i)
    for i, (kind, batch) in enumerate(product(LATENTS, PACKED)):
        codec = LATENTS[kind]
        if not codec.refusal(batch[2]):
            yield f"{kind}, {batch}", paged_latents(*batch, dtype, seed=i, codec=codec)


def latent_attention_traits(
    q_latent: Tensor, q_rope: Tensor, latents: KVCache, **rest: Any
) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    sizes = dict(heads=q_latent.shape[1], latent=q_latent.shape[2], rope=q_rope.shape[2])
    return sizes | dict(codecs=codecs_of(latents))


def latent_rope(
    tokens: int,
    heads: int,
    plain: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    codec: Codec | None = None,
) -> dict[str, Any]:
    """Arguments of latent_rope_and_cache: tokens in random slots of caches that are NaN
    elsewhere. codec: of the latents, None where they are of the dtype."""
    generator = torch.Generator().manual_seed(latent)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = torch.randn(POSITIONS, rope // 2, generator=generator) * 3
    slots = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[:tokens] + PAGE_SIZE
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    slots[tokens - 1 :] = 0
    positions[tokens - 1 :] = 0
    q = beside_nan(numbers(tokens, heads * (plain + rope)))
    return dict(
        q=q.unflatten(1, (heads, plain + rope)),
        kv=beside_nan(numbers(tokens, latent + rope)),
        weight=numbers(latent),
        cos=angles.cos(),
        sin=angles.sin(),
        positions=positions,
        slot_mapping=slots,
        latents=empty_side((PAGES, PAGE_SIZE, latent), dtype, codec),
        ropes=torch.full((PAGES, PAGE_SIZE, rope), torch.nan, dtype=dtype),
        eps=1e-6,
    )


def latent_rope_and_cache_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of latent_rope_and_cache on the CPU)."""
    for layer in LAYERS:
        yield str(layer), latent_rope(*layer, dtype)
    for kind, layer in product(LATENTS, PACKED_LAYERS):
        codec = LATENTS[kind]
        if not codec.refusal(layer[3]):
            yield f"{kind}, {layer}", latent_rope(*layer, dtype, codec)


def latent_rope_and_cache_traits(latents: KVCache, ropes: Tensor, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    return dict(latent=latents.shape[2], rope=ropes.shape[2], codecs=codecs_of(latents))
