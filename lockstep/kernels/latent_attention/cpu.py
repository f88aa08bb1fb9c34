"""latent_attention on a CPU: the reference's bits with all segments of a row in one product.

Queries of all heads are rows of one product. They are taken in blocks whose number is one of the
exact sizes of both products (lockstep.kernels.row_tiles); segments that no row of a block sees are
left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import SEGMENT
from lockstep.kernels.attention.cpu import fold_segments
from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.kv import KVCache, read_pages
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.row_tiles import exact_sizes, padded_rows
from lockstep.kernels.threads import one_thread


@latent_attention.backend("cpu", supports=cpu_trait)
def latent_attention_cpu(
    q_latent: Tensor,
    q_rope: Tensor,
    latents: KVCache,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
) -> Tensor:
    """See lockstep.kernels.latent_attention.latent_attention."""
    out = torch.empty_like(q_latent)
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        begin = bounds[s]
        end = bounds[s + 1]
        if begin < end:
            tokens = start + end - begin
            values = _segments(latents, page_table[s], tokens, out.dtype)
            keys = torch.cat([values, _segments(ropes, page_table[s], tokens, out.dtype)], -1)
            queries = torch.cat([q_latent[begin:end], q_rope[begin:end]], -1).float() * scale
            out[begin:end] = _attend(queries, keys, values, start).to(out.dtype)
    return out


def _segments(cache: KVCache, pages: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """What a cache holds of a row's first tokens, unpacked to dtype, zero-padded:
    [segments, SEGMENT, D] fp32."""
    used = -(-tokens // cache.shape[1])
    found = read_pages(cache, pages[:used], dtype).flatten(0, 1)[:tokens].float()
    return F.pad(found, (0, 0, 0, -tokens % SEGMENT)).unflatten(0, (-1, SEGMENT))


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """One row: q [Q, H, C + R] scaled, at positions start.., keys and values of _segments
    -> [Q, H, C]."""
    heads = q.shape[1]
    of_values = exact_sizes(SEGMENT, values.shape[2])
    of_keys = exact_sizes(keys.shape[2], SEGMENT)
    shared = tuple(size for size in of_keys if size in of_values)
    if not shared:
        with one_thread():
            return _attend(q, keys, values, start)
    parts = []
    flat = q.flatten(0, 1)
    for at in range(0, len(flat), shared[-1]):
        rows = flat[at : at + shared[-1]]
        last = start + (at + torch.arange(len(rows))) // heads
        seen = int(last[-1]) // SEGMENT + 1
        short = padded_rows(len(rows), shared) - len(rows)
        tile = F.pad(rows, (0, 0, 0, short))
        last = F.pad(last, (0, short))
        folded = fold_segments(tile[None], keys[None, :seen], values[None, :seen], last[None])
        parts.append(folded[0, : len(rows)])
    return torch.cat(parts).unflatten(0, (-1, heads))
