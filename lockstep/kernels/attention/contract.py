"""Contract and reference of paged_attention: any query length over a paged KV cache.

The keys of a row are cut into KV splits at absolute multiples of KV_SPLIT. A split gives (maximum,
sum, output) by softmax over its own keys. Splits are added in ascending order, each rescaled to the
row's maximum. Prefill, decode and verification use the same tree, so the bits of a token depend on
its own prefix alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.activations import sigmoid
from lockstep.kernels.formats.kv import KVCache, dequantize, rotate_back
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tiled_mm

KV_SPLIT = 256
"""Keys of a KV split. H200, one row of one token, context 4,096: 16.7 us, 18.0 with 128."""


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
    """Attend with the queries of a ragged batch over their rows' cached keys and values.

    Token i of row s is at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    included, which is already in the cache. Query head h reads KV head h // (H / Hkv). A quantized
    cache gives the bits of the same cache dequantized to q's dtype. Where its format rotates keys,
    q is in the same rotation; where it rotates values, their weighted sums are rotated back before
    they are rounded.

    Args:
        q: [T, H, D].
        k_cache, v_cache: [pages, page_size, Hkv, D] of q's dtype, or quantized.
        page_table: [S, P] int32, the pages of each row.
        cu_seqlens: [S + 1] int32, the first token of each row in q.
        starts: [S] int32, the tokens of each row that are cached already.
        query_len: maximum tokens of a row, a static bound.
        scale: factor of the scores.
        gates: [T, N], the tokens' gated projection: per head D of q, then D of the gate whose
            sigmoid multiplies the head's output. Output, sigmoid and product are each rounded.

    Returns: [T, H, D] of q's dtype.
    """
    out = torch.empty_like(q)
    keys = dequantize(k_cache, q.dtype)
    values = dequantize(v_cache, q.dtype)
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
            k = _gather_keys(keys[:, :, h], page_table[s], end)
            v = _gather_keys(values[:, :, h], page_table[s], end)
            attended = _attend(queries, k, v, positions.repeat_interleave(group))
            attended = rotate_back(attended, v_cache)
            out[tokens, heads] = attended.unflatten(0, (-1, group)).to(q.dtype)
    return out if gates is None else apply_gates(out, gates)


def apply_gates(out: Tensor, gates: Tensor) -> Tensor:
    """Multiply out [T, H, D] by the sigmoid of its gates, which are in the op's gates [T, N]."""
    heads, dim = out.shape[1:]
    gate = gates[:, : 2 * heads * dim].unflatten(-1, (heads, 2 * dim))[..., dim:]
    return out * sigmoid(gate)


def _gather_keys(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """Gather the first `keys` tokens of a row from one head's cache [pages, page_size, D].

    Returns: [splits * KV_SPLIT, D] fp32, zero-padded to a whole split.
    """
    used = -(-keys // cache.shape[1])
    gathered = cache[pages[:used].long()].flatten(0, 1)[:keys].float()
    return F.pad(gathered, (0, 0, 0, -keys % KV_SPLIT))


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attend with scaled queries q [N, D] at positions [N] over k, v [splits * KV_SPLIT, D] of one
    KV head.

    Weights and sums of a split are fp32. Splits are added in fp64 and rounded once.

    Returns: [N, D] fp32.
    """
    maxima: list[Tensor] = []
    sums: list[Tensor] = []
    outputs: list[Tensor] = []
    for first_key in range(0, len(k), KV_SPLIT):
        split = slice(first_key, first_key + KV_SPLIT)
        # Row tiles keep a row's bits independent of the number of rows (row_tiles.py).
        scores = tiled_mm(q, k[split].t().contiguous())
        hidden = torch.arange(first_key, first_key + KV_SPLIT) > positions[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        maximum = scores.amax(-1, keepdim=True)
        # Maximum of a split in which a query sees no key: exp gives zeros, not NaN.
        min_score = torch.finfo(torch.float32).min
        weights = torch.exp(scores - maximum.clamp_min(min_score))
        maxima.append(maximum)
        sums.append(weights.sum(-1, keepdim=True))
        outputs.append(tiled_mm(weights, v[split].contiguous()))
    all_max = torch.stack(maxima).amax(0)
    total_output = torch.zeros(q.shape, dtype=torch.float64)
    total_sum = torch.zeros(len(q), 1, dtype=torch.float64)
    for maximum, split_sum, output in zip(maxima, sums, outputs, strict=True):
        scale = torch.exp(maximum - all_max)
        total_output += output * scale
        total_sum += split_sum * scale
    return total_output.float() / total_sum.float()
