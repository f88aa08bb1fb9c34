"""Batches of paged_attention for every backend. Values that no row may read are NaN."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, KVFormat, quantizers_of, write_slots
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS, empty_cache, fits

Row = tuple[int, int]
"""(tokens before this step, tokens of this step)."""

DECODE = ((0, 1), (63, 1), (300, 1))
ODD = ((5, 3), (0, 0), (254, 3))
VERIFY = ((5, 4), (254, 4), (511, 4))
WIDE = ((0, 16), (70, 16), (500, 16))
RAGGED = ((0, 70), (12, 0), (250, 9), (64, 1))
BATCHES: tuple[tuple[tuple[Row, ...], int, int, int, int], ...] = (
    (DECODE, 4, 4, 32, 16),
    (ODD, 12, 2, 24, 16),
    (VERIFY, 12, 2, 64, 64),
    (VERIFY, 5, 1, 80, 32),
    (RAGGED, 8, 1, 48, 64),
    (RAGGED, 14, 2, 32, 16),
    (VERIFY, 4, 2, 128, 64),
    (DECODE, 16, 1, 256, 64),
    (RAGGED, 8, 2, 32, 16),
    (RAGGED, 4, 2, 128, 64),
    (RAGGED, 4, 1, 256, 64),
    (WIDE, 8, 1, 64, 64),
    (WIDE, 12, 2, 32, 16),
)
"""(rows, query heads, KV heads, head dim, page size)."""
QUANTIZED = (
    (((5, 4), (0, 0), (254, 3)), 5, 1, 80, 64),
    (((5, 4), (0, 0), (254, 3)), 5, 1, 128, 64),
    (((0, 9), (250, 9), (64, 1)), 4, 2, 32, 16),
)
"""Batches in every format that stores the dim: an odd dim and an empty row in pages of a tile; two
rotation blocks of values; pages smaller than a tile."""


def page_rows(
    rows: tuple[Row, ...], page_size: int, min_columns: int, generator: torch.Generator
) -> tuple[int, list[Tensor], dict[str, Any]]:
    """Give rows pages in random order.

    Returns: (pages of a cache with the null page, cache slots of each row's tokens, the arguments
    page_table, cu_seqlens, starts and query_len of an op).
    """
    lengths = [start + count for start, count in rows]
    page_counts = [-(-length // page_size) for length in lengths]
    free_pages = torch.randperm(sum(page_counts), generator=generator) + 1
    table = torch.zeros(len(rows), max(*page_counts, min_columns, 1), dtype=torch.int32)
    slots = []
    for s, (length, pages) in enumerate(zip(lengths, free_pages.split(page_counts), strict=True)):
        table[s, : len(pages)] = pages.int()
        token = torch.arange(length)
        slots.append(pages[token // page_size] * page_size + token % page_size)
    counts = torch.tensor([0, *(count for _, count in rows)], dtype=torch.int32)
    metadata = dict(
        page_table=table,
        cu_seqlens=counts.cumsum(0, dtype=torch.int32),
        starts=torch.tensor([start for start, _ in rows], dtype=torch.int32),
        query_len=max(count for _, count in rows),
    )
    return sum(page_counts) + 1, slots, metadata


def paged(
    rows: tuple[Row, ...],
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    min_columns: int = 0,
    format: KVFormat | None = None,
) -> dict[str, Any]:
    """Return arguments of paged_attention: pages in random order, everything unwritten NaN.

    format: of the caches, None where they are of the dtype. min_columns: minimum columns of the
    page table.
    """
    generator = torch.Generator().manual_seed(seed)
    num_pages, slots_of_rows, metadata = page_rows(rows, page_size, min_columns, generator)
    k_cache, v_cache = empty_cache((num_pages, page_size, kv_heads, dim), dtype, format)
    for slots in slots_of_rows:
        for cache in (k_cache, v_cache):
            values = torch.randn(len(slots), kv_heads, dim, generator=generator).to(dtype)
            write_slots(cache, slots, values)
    tokens = sum(count for _, count in rows)
    return dict(
        q=torch.randn(tokens, heads, dim, generator=generator).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        **metadata,
        scale=dim**-0.5,
    )


def paged_attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of paged_attention on the CPU)."""
    for i, (rows, heads, kv_heads, dim, page_size) in enumerate(BATCHES):
        name = f"{len(rows)} rows, heads {heads}/{kv_heads}, dim {dim}, page {page_size}"
        yield name, paged(rows, heads, kv_heads, dim, page_size, dtype, seed=i)
    for i, (format, batch) in enumerate(product(KERNEL_FORMATS, QUANTIZED)):
        if fits(KERNEL_FORMATS[format], batch[3]):
            yield f"{format}, {batch}", paged(*batch, dtype, seed=i, format=KERNEL_FORMATS[format])


def paged_attention_traits(
    q: Tensor, k_cache: KVCache, v_cache: KVCache, **rest: Any
) -> dict[str, Any]:
    """Return the traits by which a layer with these arguments chooses a backend."""
    traits: dict[str, Any] = dict(heads=q.shape[1], kv_heads=k_cache.shape[2], head_dim=q.shape[2])
    return traits | dict(quantizers=quantizers_of(k_cache, v_cache))
