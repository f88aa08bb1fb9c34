"""paged_attention on a CPU: the reference's bits with all rows, heads and segments in one product.

Rows with equal numbers of queries and segments, e.g. those that decode, are one batch. Queries are
taken in blocks of (token, head of the group) rows whose number is one of the exact sizes of both
products (lockstep.kernels.row_tiles); segments that no row of a block sees are left out.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import SEGMENT, gated, paged_attention
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.kv import KVCache, read_pages, turned_back
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
    """See lockstep.kernels.attention.paged_attention."""
    out = torch.empty_like(q)
    begins = cu_seqlens.tolist()
    firsts = starts.tolist()
    for rows in _alike(begins, firsts):
        queries = begins[rows[0] + 1] - begins[rows[0]]
        ends = [firsts[s] + queries for s in rows]
        tokens = _tokens([begins[s] for s in rows], queries)
        table = page_table[rows]
        k = _segments(k_cache, table, ends, q.dtype)
        v = _segments(v_cache, table, ends, q.dtype)
        mixed = _attend(q[tokens].float() * scale, k, v, starts[rows])
        out[tokens] = turned_back(mixed, v_cache).to(q.dtype)
    return out if gates is None else gated(out, gates)


def _alike(begins: Sequence[int], starts: Sequence[int]) -> Iterator[list[int]]:
    """Yield rows with equal numbers of queries and of segments, which share one batched product.

    A step of a small model is bound by the number of its ops: 8 rows of 3 KV heads took 24 folds a
    layer. A batch holds at most MAX_KEYS keys, or one row.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for s, start in enumerate(starts):
        queries = begins[s + 1] - begins[s]
        if queries:
            segments = -(-(start + queries) // SEGMENT)
            groups.setdefault((queries, segments), []).append(s)
    for (_, segments), rows in groups.items():
        size = max(1, MAX_KEYS // (segments * SEGMENT))
        for at in range(0, len(rows), size):
            yield rows[at : at + size]


def _tokens(begins: Sequence[int], queries: int) -> Tensor:
    """Return the indices of each row's tokens: [S, queries]."""
    return torch.tensor(begins)[:, None] + torch.arange(queries)


def _segments(
    cache: KVCache, page_table: Tensor, ends: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Load the first ends[s] tokens of each row, zero-padded to as many segments as the longest
    row has: [S * Hkv, segments, SEGMENT, D] fp32."""
    size = cache.shape[1]
    longest = max(ends)
    used = -(-longest // size)
    pages = page_table[:, :used].flatten()
    keys = read_pages(cache, pages, dtype).unflatten(0, (-1, used)).flatten(1, 2)[:, :longest]
    keys = keys.float()
    for row, end in zip(keys, ends, strict=True):
        # The rest of a page holds what an earlier request left there, maybe NaN, and 0 * NaN is
        # NaN: a weight of zero does not hide it.
        row[end:] = 0
    keys = F.pad(keys, (0, 0, 0, 0, 0, -longest % SEGMENT))
    return keys.unflatten(1, (-1, SEGMENT)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attend with rows of one number of queries.

    Args:
        q: [S, Q, H, D], scaled.
        k, v: of _segments.
        starts: [S], the position of each row's first query.

    Returns: [S, Q, H, D] fp32.
    """
    queries, heads, dim = q.shape[1:]
    kv_heads = len(k) // len(q)
    group = heads // kv_heads
    of_values = exact_sizes(SEGMENT, dim)
    shared = tuple(size for size in exact_sizes(dim, SEGMENT) if size in of_values)
    if not shared:
        with one_thread():
            return _attend(q, k, v, starts)
    every = q.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)
    first = int(starts.max())
    parts = []
    for at in range(0, queries * group, shared[-1]):
        rows = every[:, :, at : at + shared[-1]]
        count = rows.shape[2]
        offsets = torch.arange(at, at + count) // group
        seen = (first + int(offsets[-1])) // SEGMENT + 1
        short = padded_rows(count, shared) - count
        rows = F.pad(rows, (0, 0, 0, short))
        last = F.pad(starts[:, None] + offsets, (0, short)).repeat_interleave(kv_heads, 0)
        folded = fold_segments(rows.flatten(0, 1), k[:, :seen], v[:, :seen], last)
        parts.append(folded[:, :count].unflatten(0, (-1, kv_heads)))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return mixed.unflatten(2, (-1, group)).transpose(1, 2).flatten(2, 3)


def fold_segments(rows: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
    """Fold the segments of B independent heads: row r of head b sees keys 0 .. last[b, r].

    Segments past a row's last key add exact zeros. cumsum adds one after another, in fp64, and
    rounds.

    Args:
        rows: [B, R, D].
        k, v: [B, segments, SEGMENT, D] and [B, segments, SEGMENT, V].
        last: [B, R].

    Returns: [B, R, V].
    """
    heads, segments = k.shape[:2]
    tiles = rows[:, None].expand(-1, segments, -1, -1).flatten(0, 1)
    scores = tiled_bmm(tiles, k.flatten(0, 1).transpose(1, 2).contiguous())
    scores = scores.unflatten(0, (heads, segments))
    keys = torch.arange(segments * SEGMENT).view(-1, 1, SEGMENT)
    scores.masked_fill_(keys > last[:, None, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp_min(torch.finfo(torch.float32).min)).exp_()
    part = tiled_bmm(weights.flatten(0, 1), v.flatten(0, 1).contiguous())
    part = part.unflatten(0, (heads, segments))
    norm = weights.sum(-1, keepdim=True)
    if segments == 1:
        return (part / norm)[:, 0]
    scale = torch.exp(top - top.amax(1, keepdim=True))
    return (part * scale).cumsum(1)[:, -1] / (norm * scale).cumsum(1)[:, -1]
