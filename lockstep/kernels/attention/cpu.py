"""paged_attention on a CPU: the reference's bits with all segments of a head in one product.

Queries are taken in blocks of (token, head of the group) rows whose number is one of the exact
sizes of both products (lockstep.kernels.row_tiles); segments that no row of a block sees are left
out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import SEGMENT, gated, paged_attention
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.kv import KVCache, read_pages, turned_back
from lockstep.kernels.row_tiles import exact_sizes, padded_rows, tiled_bmm
from lockstep.kernels.threads import one_thread


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
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        begin = bounds[s]
        end = bounds[s + 1]
        if begin < end:
            k = _segments(k_cache, page_table[s], start + end - begin, q.dtype)
            v = _segments(v_cache, page_table[s], start + end - begin, q.dtype)
            found = _attend(q[begin:end].float() * scale, k, v, start)
            out[begin:end] = turned_back(found, v_cache).to(q.dtype)
    return out if gates is None else gated(out, gates)


def _segments(cache: KVCache, pages: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """The first `keys` tokens of a row, zero-padded: [segments, SEGMENT, Hkv, D] fp32."""
    size = cache.shape[1]
    used = -(-keys // size)
    found = read_pages(cache, pages[:used], dtype).flatten(0, 1).float()
    short = -(-keys // SEGMENT) * SEGMENT - keys
    return F.pad(found[:keys], (0, 0, 0, 0, 0, short)).unflatten(0, (-1, SEGMENT))


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """One row: q [Q, H, D] scaled, at positions start.., k and v of _segments -> [Q, H, D]."""
    queries, heads, dim = q.shape
    group = heads // k.shape[2]
    of_values = exact_sizes(SEGMENT, dim)
    shared = tuple(size for size in exact_sizes(dim, SEGMENT) if size in of_values)
    if not shared:
        with one_thread():
            return _attend(q, k, v, start)
    every = q.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
    parts = []
    for at in range(0, queries * group, shared[-1]):
        rows = every[:, at : at + shared[-1]]
        count = rows.shape[1]
        last = start + torch.arange(at, at + count) // group
        seen = int(last[-1]) // SEGMENT + 1
        short = padded_rows(count, shared) - count
        rows = F.pad(rows, (0, 0, 0, short))
        last = F.pad(last, (0, short))
        done = [
            fold_segments(rows[h], k[:seen, :, h], v[:seen, :, h], last)[:count]
            for h in range(len(rows))
        ]
        parts.append(torch.stack(done))
    found = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return found.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)


def fold_segments(rows: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
    """rows [R, D]; k [segments, SEGMENT, D], v [segments, SEGMENT, V]; row r sees keys 0 .. last[r]
    -> [R, V].

    Segments past a row's last key add exact zeros. cumsum adds one after another, in fp64, and
    rounds.
    """
    scores = tiled_bmm(rows, k.transpose(1, 2).contiguous())
    keys = torch.arange(k.shape[0] * SEGMENT).view(-1, 1, SEGMENT)
    scores.masked_fill_(keys > last[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp_min(torch.finfo(torch.float32).min)).exp_()
    part = tiled_bmm(weights, v.contiguous())
    norm = weights.sum(-1, keepdim=True)
    if k.shape[0] == 1:
        return (part / norm)[0]
    scale = torch.exp(top - top.amax(0, keepdim=True))
    return (part * scale).cumsum(0)[-1] / (norm * scale).cumsum(0)[-1]
