"""paged_attention on a CPU: the reference's bits with all rows, heads and KV splits in one product.

Rows with equal numbers of queries and splits, e.g. those that decode, are one batch. Queries are
processed in blocks of (token, query head) rows whose number is one of the exact tile sizes of both
products (lockstep.kernels.row_tiles). Splits that no row of a block sees are left out.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import KV_SPLIT, apply_gates, paged_attention
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.kv import KVCache, read_pages, rotate_back
from lockstep.kernels.row_tiles import exact_sizes, padded_rows, tiled_bmm
from lockstep.kernels.threads import one_thread

MAX_KEYS = 8192
"""Keys, padding included, that one batched product covers; bounds the memory of a step."""
CACHED_MASKS = 4
"""Causal masks that are kept: every layer of a step asks for the same one."""


@paged_attention.backend("cpu", supports=cpu_trait)
def paged_attention_cpu(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    gates: Tensor | None = None,
) -> Tensor:
    """Run paged_attention in batched products of fixed row tiles."""
    out = torch.empty_like(q)
    begins = cu_seqlens.tolist()
    row_starts = starts.tolist()
    for rows in _batches(begins, row_starts):
        queries = begins[rows[0] + 1] - begins[rows[0]]
        batch_starts = [row_starts[s] for s in rows]
        ends = [start + queries for start in batch_starts]
        num_splits = -(-max(ends) // KV_SPLIT)
        tokens = _token_index([begins[s] for s in rows], queries)
        table = page_table[rows]
        k = _load_keys(k_cache, table, num_splits, q.dtype)
        v = _load_values(v_cache, table, num_splits, ends, q.dtype)
        scaled = q[tokens].float().mul(scale).unflatten(0, (len(rows), queries))
        mixed = _attend(scaled, k, v, batch_starts).flatten(0, 1)
        out[tokens] = rotate_back(mixed, v_cache).to(q.dtype)
    return out if gates is None else apply_gates(out, gates)


def _batches(begins: Sequence[int], starts: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows with equal numbers of queries and of splits, which share one batched product.

    A step of a small model is bound by the number of its ops: 8 rows of 3 KV heads took 24 passes a
    layer. A batch holds at most MAX_KEYS keys, or one row.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for s, start in enumerate(starts):
        queries = begins[s + 1] - begins[s]
        if queries:
            num_splits = -(-(start + queries) // KV_SPLIT)
            groups.setdefault((queries, num_splits), []).append(s)
    for (_, num_splits), rows in groups.items():
        size = max(1, MAX_KEYS // (num_splits * KV_SPLIT))
        for begin in range(0, len(rows), size):
            yield rows[begin : begin + size]


def _token_index(begins: Sequence[int], queries: int) -> slice | Tensor:
    """Return the index of the tokens of rows that begin at `begins`: a slice if they are adjacent,
    which costs no gather."""
    count = len(begins) * queries
    if begins[-1] - begins[0] + queries == count:
        return slice(begins[0], begins[0] + count)
    return (torch.tensor(begins)[:, None] + torch.arange(queries)).flatten()


def _read_splits(cache: KVCache, page_table: Tensor, num_splits: int, dtype: torch.dtype) -> Tensor:
    """Read whole splits of each row: [S, splits, KV_SPLIT, Hkv, D] of dtype.

    Pages that a row lacks are read from the null page, whose contents are arbitrary, as is the rest
    of a row's last page.
    """
    num_keys = num_splits * KV_SPLIT
    num_pages = -(-num_keys // cache.shape[1])
    table = page_table[:, :num_pages]
    pages = F.pad(table, (0, num_pages - table.shape[1])).flatten()
    keys = read_pages(cache, pages, dtype).unflatten(0, (-1, num_pages)).flatten(1, 2)
    return keys[:, :num_keys].unflatten(1, (num_splits, KV_SPLIT))


def _load_keys(cache: KVCache, page_table: Tensor, num_splits: int, dtype: torch.dtype) -> Tensor:
    """Load the keys of each row, transposed for Q K^T: [S * Hkv, splits, D, KV_SPLIT] fp32.

    Keys that no query sees are arbitrary, maybe NaN: the causal mask replaces their scores.
    """
    keys = _read_splits(cache, page_table, num_splits, dtype).permute(0, 3, 1, 4, 2)
    return torch.empty(keys.shape).copy_(keys).flatten(0, 1)


def _load_values(
    cache: KVCache, page_table: Tensor, num_splits: int, ends: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Load the first ends[s] values of each row: [S * Hkv, splits, KV_SPLIT, D] fp32, then zeros.

    What an earlier request left in a page may be NaN, and 0 * NaN is NaN: a weight of zero does not
    hide it.
    """
    stored = _read_splits(cache, page_table, num_splits, dtype).permute(0, 3, 1, 2, 4)
    values = torch.empty(stored.shape).copy_(stored)
    for row, end in zip(values.flatten(2, 3), ends, strict=True):
        row[:, end:].zero_()
    return values.flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int]) -> Tensor:
    """Attend with rows of one number of queries.

    Args:
        q: [S, Q, H, D], scaled.
        k, v: of _load_keys and _load_values.
        starts: position of each row's first query.

    Returns: [S, Q, H, D] fp32.
    """
    queries, heads, dim = q.shape[1:]
    kv_heads = len(k) // len(q)
    group = heads // kv_heads
    value_sizes = exact_sizes(KV_SPLIT, dim)
    # Sizes whose bits are exact in both products, Q K^T and P V.
    tile_sizes = tuple(size for size in exact_sizes(dim, KV_SPLIT) if size in value_sizes)
    if not tile_sizes:
        # No common exact size on several threads: one thread defines the bits.
        with one_thread():
            return _attend(q, k, v, starts)
    queries_by_head = q.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
    parts = []
    for begin in range(0, queries * group, tile_sizes[-1]):
        rows = queries_by_head[:, :, begin : begin + tile_sizes[-1]]
        count = rows.shape[2]
        size = padded_rows(count, tile_sizes)
        hidden = causal_mask(tuple(starts), begin, count, size, group)
        visible_splits = hidden.shape[1]
        attended = combine_splits(
            F.pad(rows, (0, 0, 0, size - count)).flatten(0, 1),
            k[:, :visible_splits],
            v[:, :visible_splits],
            hidden,
        )
        parts.append(attended[:, :count].unflatten(0, (-1, kv_heads)))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return mixed.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)


@lru_cache(CACHED_MASKS)
def causal_mask(starts: tuple[int, ...], begin: int, count: int, size: int, group: int) -> Tensor:
    """Return the keys that query rows do not see: [S, splits, size, KV_SPLIT] bool.

    Args:
        starts: position of the first query of each of S rows.
        begin, count: the query rows of this tile; `group` of them share one token. Those from
            `count` to `size` are padding and see one key.
        size: rows of the tile.
        group: query heads of one KV head.

    As many splits are returned as the last query sees.
    """
    offsets = torch.arange(begin, begin + count) // group
    num_splits = (max(starts) + int(offsets[-1])) // KV_SPLIT + 1
    last_key = F.pad(torch.tensor(starts)[:, None] + offsets, (0, size - count))
    keys = torch.arange(num_splits * KV_SPLIT).view(-1, 1, KV_SPLIT)
    return keys > last_key[:, None, :, None]


def combine_splits(rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Attend with B independent heads, B / S adjacent ones for each of S rows.

    Splits past a row's last key add exact zeros. cumsum adds the splits one after another in fp64
    and rounds, as the reference does.

    Args:
        rows: [B, R, D].
        k, v: [B, splits, D, KV_SPLIT] and [B, splits, KV_SPLIT, V].
        hidden: [S, splits, R, KV_SPLIT] bool, the keys that a row does not see.

    Returns: [B, R, V].
    """
    heads, num_splits = k.shape[:2]
    tiles = rows[:, None].expand(-1, num_splits, -1, -1).flatten(0, 1)
    scores = tiled_bmm(tiles, k.flatten(0, 1)).unflatten(0, (heads, num_splits))
    scores.unflatten(0, (len(hidden), -1)).masked_fill_(hidden[:, None], -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maximum.clamp_min(torch.finfo(torch.float32).min)).exp_()
    outputs = tiled_bmm(weights.flatten(0, 1), v.flatten(0, 1))
    outputs = outputs.unflatten(0, (heads, num_splits))
    sums = weights.sum(-1, keepdim=True)
    # One split: rescaling by exp(0) would change nothing.
    if num_splits == 1:
        return (outputs / sums)[:, 0]
    scale = torch.exp(maximum - maximum.amax(1, keepdim=True))
    return (outputs * scale).cumsum(1)[:, -1] / (sums * scale).cumsum(1)[:, -1]
