"""paged_attention: any query length over paged KV, folded at fixed absolute positions.

The keys of a row are cut at absolute multiples of SEGMENT. A segment gives (max, sum, output) by
softmax in base e over its own keys; segments are folded in ascending order. Prefill, decode and
verification use the same fold, so a token's bits depend on its own prefix alone.
"""

import torch
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.tiles import tiled_linear

SEGMENT = 256


@op
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
) -> Tensor:
    """q [T, H, D]; k_cache, v_cache [pages, page_size, Hkv, D]; page_table [S, P] int32;
    cu_seqlens [S+1] int32; starts [S] int32 -> [T, H, D] of q's dtype.

    Token i of row s sits at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    among them (already written). query_len: the most tokens a row brings (a static bound).
    Query head h reads KV head h // (H / Hkv).
    """
    out = torch.empty_like(q)
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end:
            continue
        keys = start + end - begin
        pages = page_table[s, : -(-keys // k_cache.shape[1])].long()
        k = k_cache[pages].flatten(0, 1)[:keys]
        v = v_cache[pages].flatten(0, 1)[:keys]
        out[begin:end] = _attend(q[begin:end], k, v, start, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """One row: q [Q, H, D] at positions start.., k and v [keys, Hkv, D] -> [Q, H, D]."""
    queries, heads, dim = q.shape
    group = heads // k.shape[1]
    position = torch.arange(start, start + queries).repeat_interleave(group)
    out = torch.empty_like(q)
    for h in range(k.shape[1]):
        mine = slice(h * group, (h + 1) * group)
        rows = (q[:, mine].float() * scale).reshape(queries * group, dim)
        folded = _fold(rows, k[:, h].float(), v[:, h].float(), position)
        out[:, mine] = folded.view(queries, group, dim).to(q.dtype)
    return out


def _fold(rows: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """rows [R, D] in ascending position [R], k and v [keys, D] fp32 -> [R, D] fp32."""
    total = torch.zeros(rows.shape[0], v.shape[1])
    norm = torch.zeros(rows.shape[0], 1)
    top = torch.full((rows.shape[0], 1), -torch.inf)
    for left in range(0, k.shape[0], SEGMENT):
        first = int(torch.searchsorted(position, left))
        part, part_norm, part_top = _segment(
            rows[first:], k[left : left + SEGMENT], v[left : left + SEGMENT], position[first:] - left
        )
        new_top = torch.maximum(top[first:], part_top)
        old, new = torch.exp(top[first:] - new_top), torch.exp(part_top - new_top)
        total[first:] = total[first:] * old + part * new
        norm[first:] = norm[first:] * old + part_norm * new
        top[first:] = new_top
    return total / norm


def _segment(rows: Tensor, k: Tensor, v: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One segment, zero-padded to SEGMENT keys; row r sees its keys 0 .. last[r]."""
    if k.shape[0] < SEGMENT:
        short = SEGMENT - k.shape[0]
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (k, v))
    scores = tiled_linear(rows, k.contiguous())
    scores.masked_fill_(torch.arange(SEGMENT) > last[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    return tiled_linear(weights, v.t().contiguous()), weights.sum(-1, keepdim=True), top
