"""paged_attention on a CPU: the reference's bits with all rows, heads and KV splits in one product.

Rows with equal numbers of queries and splits, e.g. those that decode, are one batch. Queries are
processed in blocks of (token, query head) rows whose number is one of the exact tile sizes of both
products (lockstep.kernels.row_tiles). Splits that no row of a block sees are left out.
"""

from collections.abc import Iterator, Sequence

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
        ends = [row_starts[s] + queries for s in rows]
        tokens = _tokens([begins[s] for s in rows], queries)
        table = page_table[rows]
        k = _load_splits(k_cache, table, ends, q.dtype)
        v = _load_splits(v_cache, table, ends, q.dtype)
        mixed = _attend(q[tokens].float() * scale, k, v, starts[rows])
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


def _tokens(begins: Sequence[int], queries: int) -> Tensor:
    """Return the indices of each row's tokens: [S, queries]."""
    return torch.tensor(begins)[:, None] + torch.arange(queries)


def _load_splits(
    cache: KVCache, page_table: Tensor, ends: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Load the first ends[s] tokens of each row: [S * Hkv, splits, KV_SPLIT, D] fp32.

    Rows are zero-padded to the splits of the longest one.
    """
    size = cache.shape[1]
    longest = max(ends)
    num_pages = -(-longest // size)
    pages = page_table[:, :num_pages].flatten()
    keys = read_pages(cache, pages, dtype).unflatten(0, (-1, num_pages)).flatten(1, 2)[:, :longest]
    keys = keys.float()
    for row, end in zip(keys, ends, strict=True):
        # The rest of a page holds what an earlier request left there, maybe NaN, and 0 * NaN is
        # NaN: a weight of zero does not hide it.
        row[end:] = 0
    keys = F.pad(keys, (0, 0, 0, 0, 0, -longest % KV_SPLIT))
    return keys.unflatten(1, (-1, KV_SPLIT)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attend with rows of one number of queries.

    Args:
        q: [S, Q, H, D], scaled.
        k, v: of _load_splits.
        starts: [S], the position of each row's first query.

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
    max_start = int(starts.max())
    parts = []
    for begin in range(0, queries * group, tile_sizes[-1]):
        rows = queries_by_head[:, :, begin : begin + tile_sizes[-1]]
        count = rows.shape[2]
        offsets = torch.arange(begin, begin + count) // group
        visible_splits = (max_start + int(offsets[-1])) // KV_SPLIT + 1
        padding = padded_rows(count, tile_sizes) - count
        rows = F.pad(rows, (0, 0, 0, padding))
        last_key = F.pad(starts[:, None] + offsets, (0, padding)).repeat_interleave(kv_heads, 0)
        attended = combine_splits(
            rows.flatten(0, 1), k[:, :visible_splits], v[:, :visible_splits], last_key
        )
        parts.append(attended[:, :count].unflatten(0, (-1, kv_heads)))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return mixed.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)


def combine_splits(rows: Tensor, k: Tensor, v: Tensor, last_key: Tensor) -> Tensor:
    """Attend with B independent heads: row r of head b sees keys 0 .. last_key[b, r].

    Splits past a row's last key add exact zeros. cumsum adds the splits one after another in fp64
    and rounds, as the reference does.

    Args:
        rows: [B, R, D].
        k, v: [B, splits, KV_SPLIT, D] and [B, splits, KV_SPLIT, V].
        last_key: [B, R].

    Returns: [B, R, V].
    """
    heads, num_splits = k.shape[:2]
    tiles = rows[:, None].expand(-1, num_splits, -1, -1).flatten(0, 1)
    scores = tiled_bmm(tiles, k.flatten(0, 1).transpose(1, 2).contiguous())
    scores = scores.unflatten(0, (heads, num_splits))
    keys = torch.arange(num_splits * KV_SPLIT).view(-1, 1, KV_SPLIT)
    # Causal mask by absolute positions.
    scores.masked_fill_(keys > last_key[:, None, :, None], -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maximum.clamp_min(torch.finfo(torch.float32).min)).exp_()
    outputs = tiled_bmm(weights.flatten(0, 1), v.flatten(0, 1).contiguous())
    outputs = outputs.unflatten(0, (heads, num_splits))
    sums = weights.sum(-1, keepdim=True)
    # One split: rescaling by exp(0) would change nothing.
    if num_splits == 1:
        return (outputs / sums)[:, 0]
    scale = torch.exp(maximum - maximum.amax(1, keepdim=True))
    return (outputs * scale).cumsum(1)[:, -1] / (sums * scale).cumsum(1)[:, -1]
