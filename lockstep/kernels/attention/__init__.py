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
from lockstep.kernels.registry import op
from lockstep.kernels.threads import one_thread
from lockstep.kernels.tiles import exact_sizes, padded_rows, tiled_bmm

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
    gates: Tensor | None = None,
) -> Tensor:
    """q [T, H, D]; k_cache, v_cache [pages, page_size, Hkv, D]; page_table [S, P] int32;
    cu_seqlens [S+1] int32; starts [S] int32 -> [T, H, D] of q's dtype.

    Token i of row s sits at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    among them (already written). query_len: the most tokens a row brings (a static bound).
    Query head h reads KV head h // (H / Hkv). gates [T, N]: the tokens' gated projection, head by
    head D of q, then D of the gate whose sigmoid multiplies that head's output; output, sigmoid and
    product are rounded.
    """
    out = torch.empty_like(q)
    bounds = cu_seqlens.tolist()
    for s, start in enumerate(starts.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin < end:
            k, v = (_segments(x, page_table[s], start + end - begin) for x in (k_cache, v_cache))
            out[begin:end] = _attend(q[begin:end].float() * scale, k, v, start).to(q.dtype)
    return out if gates is None else _gated(out, gates)


def _gated(out: Tensor, gates: Tensor) -> Tensor:
    heads, dim = out.shape[1:]
    gate = gates[:, : 2 * heads * dim].unflatten(-1, (heads, 2 * dim))[..., dim:]
    return out * sigmoid(gate)


def _segments(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """The first `keys` tokens of a row, zero-padded: [segments, SEGMENT, Hkv, D] fp32."""
    size = cache.shape[1]
    used = -(-keys // size)
    found = cache.index_select(0, pages[:used]).flatten(0, 1).float()
    short = -(-keys // SEGMENT) * SEGMENT - keys
    return F.pad(found[:keys], (0, 0, 0, 0, 0, short)).unflatten(0, (-1, SEGMENT))


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """One row: q [Q, H, D] scaled, at positions start.., k and v of _segments -> [Q, H, D]."""
    queries, heads, dim = q.shape
    group = heads // k.shape[2]
    sizes = exact_sizes(dim, SEGMENT), exact_sizes(SEGMENT, dim)
    shared = tuple(size for size in sizes[0] if size in sizes[1])
    if not shared:
        with one_thread():
            return _attend(q, k, v, start)
    block = max(shared[-1] // group, 1)
    parts = []
    for at in range(0, queries, block):
        tokens = q[at : at + block]
        count = tokens.shape[0] * group
        last = start + at + torch.arange(count) // group
        seen = -(-(start + at + tokens.shape[0]) // SEGMENT)
        short = padded_rows(count, shared) - count
        rows = tokens.unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
        rows, last = F.pad(rows, (0, 0, 0, short)), F.pad(last, (0, short))
        done = [
            _fold(rows[h], k[:seen, :, h], v[:seen, :, h], last)[:count] for h in range(len(rows))
        ]
        parts.append(torch.stack(done).unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fold(rows: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
    """rows [R, D]; k, v [segments, SEGMENT, D]; row r sees keys 0 .. last[r] -> [R, D].

    Segments past a row's last key add exact zeros; cumsum adds one after another.
    """
    scores = tiled_bmm(rows, k.transpose(1, 2).contiguous())
    keys = torch.arange(k.shape[0] * SEGMENT).view(-1, 1, SEGMENT)
    scores.masked_fill_(keys > last[:, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.clamp_min(torch.finfo(torch.float32).min)).exp_()
    part = torch.bmm(weights, v.contiguous())
    norm = weights.sum(-1, keepdim=True)
    if k.shape[0] == 1:
        return (part / norm)[0]
    scale = torch.exp(top - top.amax(0, keepdim=True))
    return (part * scale).cumsum(0)[-1] / (norm * scale).cumsum(0)[-1]
