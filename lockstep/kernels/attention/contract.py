"""paged_attention: any query length over paged KV, folded at fixed absolute positions.

The keys of a row are cut at absolute multiples of SEGMENT. A segment gives (max, sum, output) by
softmax over its own keys; segments are added in ascending order, each scaled to the row's largest
max. Prefill, decode and verification use the same fold, so a token's bits depend on its own prefix
alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.activations import sigmoid
from lockstep.kernels.formats.kv import KVCache, turned_back, unpacked
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tiled_mm

SEGMENT = 256
"""Keys of a segment. H200, one row of one token, context 4,096: 16.7 us, 18.0 with 128."""


@op
def paged_attention(
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
    """q [T, H, D]; k_cache, v_cache [pages, page_size, Hkv, D] of q's dtype, or packed, which is
    the same as unpacked to it; page_table [S, P] int32; cu_seqlens [S+1] int32; starts [S] int32
    -> [T, H, D] of q's dtype.

    Token i of row s sits at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    among them (already written). query_len: the most tokens a row brings (a static bound).
    Query head h reads KV head h // (H / Hkv). gates [T, N]: the tokens' gated projection, head by
    head D of q, then D of the gate whose sigmoid multiplies that head's output; output, sigmoid and
    product are rounded. Where the cache's format rotates keys, q is rotated as they are; where it
    rotates values, their sums are rotated back before they are rounded.
    """
    out = torch.empty_like(q)
    keys = unpacked(k_cache, q.dtype)
    values = unpacked(v_cache, q.dtype)
    group = q.shape[1] // keys.shape[2]
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if tokens.start == tokens.stop:
            continue
        end = start + tokens.stop - tokens.start
        positions = torch.arange(start, end)
        for h in range(keys.shape[2]):
            heads = slice(h * group, (h + 1) * group)
            queries = q[tokens, heads].flatten(0, 1).float() * scale
            k = _first_keys(keys[:, :, h], page_table[s], end)
            v = _first_keys(values[:, :, h], page_table[s], end)
            found = _attend(queries, k, v, positions.repeat_interleave(group))
            found = turned_back(found, v_cache)
            out[tokens, heads] = found.unflatten(0, (-1, group)).to(q.dtype)
    return out if gates is None else gated(out, gates)


def gated(out: Tensor, gates: Tensor) -> Tensor:
    """out [T, H, D] times the sigmoid of its gates, in the op's gates [T, N]."""
    heads, dim = out.shape[1:]
    gate = gates[:, : 2 * heads * dim].unflatten(-1, (heads, 2 * dim))[..., dim:]
    return out * sigmoid(gate)


def _first_keys(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """The first `keys` tokens of a row in one head's cache [pages, page_size, D], zeros behind them
    up to a whole segment: [segments * SEGMENT, D] fp32."""
    used = -(-keys // cache.shape[1])
    found = cache[pages[:used].long()].flatten(0, 1)[:keys].float()
    return F.pad(found, (0, 0, 0, -keys % SEGMENT))


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """q [N, D] scaled, at positions [N]; k, v [segments * SEGMENT, D] of one KV head -> [N, D].

    Weights and sums of a segment are fp32; segments are added in fp64 and rounded once.
    """
    tops: list[Tensor] = []
    norms: list[Tensor] = []
    parts: list[Tensor] = []
    for first in range(0, len(k), SEGMENT):
        segment = slice(first, first + SEGMENT)
        scores = tiled_mm(q, k[segment].t().contiguous())
        unseen = torch.arange(first, first + SEGMENT) > positions[:, None]
        scores = scores.masked_fill(unseen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        lowest = torch.finfo(torch.float32).min  # of a segment in which a query sees no key
        weights = torch.exp(scores - top.clamp_min(lowest))
        tops.append(top)
        norms.append(weights.sum(-1, keepdim=True))
        parts.append(tiled_mm(weights, v[segment].contiguous()))
    best = torch.stack(tops).amax(0)
    total = torch.zeros(q.shape, dtype=torch.float64)
    norm = torch.zeros(len(q), 1, dtype=torch.float64)
    for top, segment_norm, part in zip(tops, norms, parts, strict=True):
        scale = torch.exp(top - best)
        total += part * scale
        norm += segment_norm * scale
    return total.float() / norm.float()
