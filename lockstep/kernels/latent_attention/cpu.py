"""latent_attention on a CPU: the reference's bits with all KV splits of a row in one product.

Queries of all heads are rows of one product. They are processed in blocks whose number is one of
the exact tile sizes of both products (lockstep.kernels.row_tiles). Splits that no row of a block
sees are left out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.attention.cpu import causal_mask, combine_splits
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
    """Run latent_attention in products of fixed row tiles."""
    out = torch.empty_like(q_latent)
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        begin = bounds[s]
        end = bounds[s + 1]
        if begin < end:
            tokens = start + end - begin
            values = _load_splits(latents, page_table[s], tokens, out.dtype)
            keys = torch.cat([values, _load_splits(ropes, page_table[s], tokens, out.dtype)], -1)
            queries = torch.cat([q_latent[begin:end], q_rope[begin:end]], -1).float() * scale
            out[begin:end] = _attend(queries, keys, values, start).to(out.dtype)
    return out


def _load_splits(cache: KVCache, pages: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Load a row's first tokens, dequantized to dtype: [splits, KV_SPLIT, D] fp32, zero-padded."""
    num_pages = -(-tokens // cache.shape[1])
    gathered = read_pages(cache, pages[:num_pages], dtype).flatten(0, 1)[:tokens].float()
    return F.pad(gathered, (0, 0, 0, -tokens % KV_SPLIT)).unflatten(0, (-1, KV_SPLIT))


def _attend(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Attend with one row: q [Q, H, C + R] scaled, at positions from `start` on.

    keys, values: of _load_splits.

    Returns: [Q, H, C] fp32.
    """
    heads = q.shape[1]
    value_sizes = exact_sizes(KV_SPLIT, values.shape[2])
    key_sizes = exact_sizes(keys.shape[2], KV_SPLIT)
    # Sizes whose bits are exact in both products, Q K^T and P V.
    tile_sizes = tuple(size for size in key_sizes if size in value_sizes)
    if not tile_sizes:
        # No common exact size on several threads: one thread defines the bits.
        with one_thread():
            return _attend(q, keys, values, start)
    parts = []
    keys_t = keys.transpose(1, 2).contiguous()
    query_rows = q.flatten(0, 1)
    for begin in range(0, len(query_rows), tile_sizes[-1]):
        rows = query_rows[begin : begin + tile_sizes[-1]]
        size = padded_rows(len(rows), tile_sizes)
        hidden = causal_mask((start,), begin, len(rows), size, heads)
        visible_splits = hidden.shape[1]
        tile = F.pad(rows, (0, 0, 0, size - len(rows)))
        attended = combine_splits(
            tile[None], keys_t[None, :visible_splits], values[None, :visible_splits], hidden
        )
        parts.append(attended[0, : len(rows)])
    return torch.cat(parts).unflatten(0, (-1, heads))
