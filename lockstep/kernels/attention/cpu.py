"""paged_attention on a CPU: the reference's bits with all rows, heads and KV splits in one product.

Rows with equal numbers of queries and splits, e.g. those that decode, are one batch. Queries are
processed in blocks of (token, query head) rows whose number is one of the exact tile sizes of both
products (lockstep.kernels.row_tiles). Splits that no row of a block sees are left out. A lone split
is read up to one of its exact lengths (exact_split_lengths).

Batches, causal masks and the indices of unseen tokens depend on the rows' lengths alone. The first
layer of a step makes them, and the others find them in a cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import KV_SPLIT, apply_gates, paged_attention
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.kv import KVCache, read_pages, rotate_back
from lockstep.kernels.row_tiles import exact_sizes, padded_rows, tiled_bmm, wide_rows
from lockstep.kernels.threads import one_thread

MAX_KEYS = 8192
"""Keys, padding included, that one batched product covers; bounds the memory of a step."""
NUM_CACHED = 4
"""Row batches, causal masks and token indices that are kept: every layer of a step asks for the
same ones."""
SHORT_SPLITS = (64, 128)
"""Lengths of a lone split that are probed."""
MIN_SCORE = torch.finfo(torch.float32).min


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows that share one batched product.

    rows, tokens: index of the rows in the page table, and of their tokens in q. starts, ends:
    positions of each row's first query, and after its last one.
    """

    rows: slice | Tensor
    tokens: slice | Tensor
    queries: int
    num_splits: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


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
    dim = q.shape[2]
    value_sizes = exact_sizes(KV_SPLIT, dim)
    # Sizes whose bits are exact in both products, Q K^T and P V.
    tile_sizes = tuple(size for size in exact_sizes(dim, KV_SPLIT) if size in value_sizes)
    if not tile_sizes:
        # No common exact size on several threads: one thread defines the bits.
        with one_thread():
            return paged_attention_cpu(
                q, k_cache, v_cache, page_table, cu_seqlens, starts, query_len, scale, gates
            )
    out = torch.empty_like(q)
    for batch in row_batches(tuple(cu_seqlens.tolist()), tuple(starts.tolist())):
        split_length = KV_SPLIT
        if batch.num_splits == 1:
            lengths = exact_split_lengths(dim, tile_sizes, torch.get_num_threads())
            split_length = next(length for length in lengths if length >= max(batch.ends))
        splits = (batch.num_splits, split_length)
        num_pages = -(-batch.num_splits * split_length // k_cache.shape[1])
        pages = _page_ids(page_table[batch.rows], num_pages)
        k = _load_keys(k_cache, pages, splits, q.dtype)
        v = _load_values(v_cache, pages, splits, batch.ends, q.dtype)
        queries = q[batch.tokens].float().mul(scale).unflatten(0, (-1, batch.queries))
        mixed = _attend(queries, k, v, batch.starts, tile_sizes)
        out[batch.tokens] = rotate_back(mixed, v_cache).flatten(0, 1).to(q.dtype)
    return out if gates is None else apply_gates(out, gates)


@lru_cache(NUM_CACHED)
def row_batches(begins: tuple[int, ...], starts: tuple[int, ...]) -> tuple[RowBatch, ...]:
    """Group the rows of a step by their number of queries and of KV splits.

    A step of a small model is bound by the number of its ops: 8 rows of 3 KV heads took 24 passes a
    layer. A batch has at most MAX_KEYS keys, or one row.

    Args:
        begins: first token of each row, then the number of tokens.
        starts: position of each row's first query.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for s, start in enumerate(starts):
        queries = begins[s + 1] - begins[s]
        if queries:
            num_splits = -(-(start + queries) // KV_SPLIT)
            groups.setdefault((queries, num_splits), []).append(s)
    return tuple(
        RowBatch(
            _index(rows, 1),
            _index([begins[s] for s in rows], queries),
            queries,
            num_splits,
            tuple(starts[s] for s in rows),
            tuple(starts[s] + queries for s in rows),
        )
        for (queries, num_splits), group in groups.items()
        for rows in _chunks(group, max(1, MAX_KEYS // (num_splits * KV_SPLIT)))
    )


def _chunks(rows: list[int], size: int) -> Iterator[list[int]]:
    """Yield the rows in lists of at most `size`."""
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def _index(begins: Sequence[int], count: int) -> slice | Tensor:
    """Return the index of `count` elements from each of `begins` on: a slice if all are adjacent,
    which costs no gather."""
    total = len(begins) * count
    if begins[-1] - begins[0] + count == total:
        return slice(begins[0], begins[0] + total)
    return (torch.tensor(begins)[:, None] + torch.arange(count)).flatten()


@cache
def exact_split_lengths(dim: int, tile_sizes: tuple[int, ...], threads: int) -> tuple[int, ...]:
    """Return the lengths, ascending, of a split that give the bits of KV_SPLIT keys.

    The keys that are left out have weight 0. They change no sum, unless a library adds fewer keys
    in another order: MKL and torch.sum do so at 192 keys on AVX2.

    Args:
        dim: of a head.
        tile_sizes: numbers of rows that are probed.
        threads: torch's current number of threads, part of the cache's key.
    """
    generator = torch.Generator().manual_seed(dim)
    k = torch.randn(2, dim, KV_SPLIT, generator=generator)
    v = torch.randn(2, KV_SPLIT, dim, generator=generator)
    q = wide_rows(tile_sizes[-1], dim, generator)
    weights = wide_rows(tile_sizes[-1], KV_SPLIT, generator).abs()

    def is_exact(length: int, size: int) -> bool:
        scores = tiled_bmm(q[:size], k)
        short_scores = tiled_bmm(q[:size], k[..., :length].contiguous())
        short_weights = weights[:size, :length].contiguous()
        all_weights = F.pad(short_weights, (0, KV_SPLIT - length))
        outputs = tiled_bmm(all_weights, v)
        short_outputs = tiled_bmm(short_weights, v[:, :length].contiguous())
        return (
            torch.equal(short_scores, scores[..., :length])
            and torch.equal(short_outputs, outputs)
            and torch.equal(short_weights.sum(-1), all_weights.sum(-1))
        )

    short = [n for n in SHORT_SPLITS if all(is_exact(n, size) for size in tile_sizes)]
    return (*short, KV_SPLIT)


def _page_ids(page_table: Tensor, count: int) -> Tensor:
    """Return the first `count` pages of each row of page_table: [S, count].

    Pages that a row lacks are the null page, whose contents are arbitrary, as is the rest of a
    row's last page.
    """
    table = page_table[:, :count]
    missing = count - table.shape[1]
    return F.pad(table, (0, missing)) if missing else table


def _load_keys(
    cache: KVCache, pages: Tensor, splits: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Load the keys of each row, transposed for Q K^T: [S * Hkv, splits, D, split length] fp32.

    Keys that no query sees are arbitrary, maybe NaN: the causal mask replaces their scores.
    """
    keys = read_pages(cache, pages.flatten(), dtype)
    keys = _cut_into_splits(keys, len(pages), splits).permute(0, 3, 1, 4, 2)
    # A copy that only transposes and one that only widens are faster than one that does both.
    return keys.contiguous().float().flatten(0, 1)


def _load_values(
    cache: KVCache,
    pages: Tensor,
    splits: tuple[int, int],
    ends: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Load the first ends[s] values of each row: [S * Hkv, splits, split length, D] fp32, then 0.

    What an earlier request left in a page may be NaN, and 0 * NaN is NaN: a weight of zero does not
    hide it.
    """
    values = read_pages(cache, pages.flatten(), dtype)
    unseen = _unseen_tokens(ends, pages.shape[1] * values.shape[1])
    values = values.flatten(0, 1).index_fill_(0, unseen, 0.0)
    values = _cut_into_splits(values, len(pages), splits).permute(0, 3, 1, 2, 4)
    return values.contiguous().float().flatten(0, 1)


def _cut_into_splits(tokens: Tensor, rows: int, splits: tuple[int, int]) -> Tensor:
    """View the tokens of all rows' pages, [.., Hkv, D], as [S, splits, split length, Hkv, D]."""
    by_row = tokens.view(rows, -1, *tokens.shape[-2:])
    return by_row[:, : splits[0] * splits[1]].unflatten(1, splits)


@lru_cache(NUM_CACHED)
def _unseen_tokens(ends: tuple[int, ...], length: int) -> Tensor:
    """Return the indices of the tokens from ends[s] to `length` of each row, in [S * length]."""
    unseen = [torch.arange(s * length + end, (s + 1) * length) for s, end in enumerate(ends)]
    return torch.cat(unseen)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], tile_sizes: tuple[int, ...]
) -> Tensor:
    """Attend with rows of one number of queries.

    Args:
        q: [S, Q, H, D], scaled.
        k, v: of _load_keys and _load_values.
        starts: position of each row's first query.
        tile_sizes: exact numbers of rows of both products.

    Returns: [S, Q, H, D] fp32.
    """
    queries, heads = q.shape[1:3]
    kv_heads = len(k) // len(q)
    group = heads // kv_heads
    queries_by_head = q.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
    parts = []
    for begin in range(0, queries * group, tile_sizes[-1]):
        rows = queries_by_head[:, :, begin : begin + tile_sizes[-1]]
        count = rows.shape[2]
        size = padded_rows(count, tile_sizes)
        hidden = causal_mask(starts, begin, count, size, group, k.shape[3])
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


@lru_cache(NUM_CACHED)
def causal_mask(
    starts: tuple[int, ...], begin: int, count: int, size: int, group: int, length: int = KV_SPLIT
) -> Tensor:
    """Return the keys that query rows do not see: [S, splits, size, length] bool.

    Args:
        starts: position of the first query of each of S rows.
        begin, count: the query rows of this tile; `group` of them share one token. Those from
            `count` to `size` are padding and see one key.
        size: rows of the tile.
        group: query heads of one KV head.
        length: keys of a split.

    As many splits are returned as the last query sees.
    """
    offsets = torch.arange(begin, begin + count) // group
    num_splits = (max(starts) + int(offsets[-1])) // KV_SPLIT + 1
    last_key = F.pad(torch.tensor(starts)[:, None] + offsets, (0, size - count))
    keys = torch.arange(num_splits * length).view(-1, 1, length)
    return keys > last_key[:, None, :, None]


def combine_splits(rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Attend with B independent heads, B / S adjacent ones for each of S rows.

    Splits past a row's last key add exact zeros. cumsum adds the splits one after another in fp64
    and rounds, as the reference does.

    Args:
        rows: [B, R, D].
        k, v: [B, splits, D, length] and [B, splits, length, V].
        hidden: [S, splits, R, length] bool, the keys that a row does not see.

    Returns: [B, R, V].
    """
    splits = k.shape[:2]
    tiles = rows if splits[1] == 1 else rows.repeat_interleave(splits[1], 0)
    scores = tiled_bmm(tiles, k.flatten(0, 1))
    scores.view(len(hidden), -1, *hidden.shape[1:]).masked_fill_(hidden[:, None], -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maximum.clamp_min(MIN_SCORE)).exp_()
    outputs = tiled_bmm(weights, v.flatten(0, 1))
    sums = weights.sum(-1, keepdim=True)
    if splits[1] == 1:
        # Rescaling by exp(0) would change nothing.
        return outputs / sums
    maximum, outputs, sums = (x.unflatten(0, splits) for x in (maximum, outputs, sums))
    scale = torch.exp(maximum - maximum.amax(1, keepdim=True))
    return (outputs * scale).cumsum(1)[:, -1] / (sums * scale).cumsum(1)[:, -1]
