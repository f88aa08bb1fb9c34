"""Contracts and references of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

A token caches one normed latent [C] and one rotary key [R] that all heads share. With the
up-projections absorbed into queries and outputs, every head attends to the same key [latent, rope]
and takes the latent as its value: one KV head of width C + R with values of width C. The reduction
tree is paged_attention's, so the bits of a token depend on its own prefix alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.formats.kv import KVCache, dequantize, write_slots
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tiled_mm


@op(writes=("latents", "ropes"), needed_for="latent attention (MLA)")
def latent_rope_and_cache(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    latents: KVCache,
    ropes: Tensor,
    eps: float,
) -> Tensor:
    """Norm the latents, rotate queries and shared keys, and write latents and keys to the cache.

    The latent's rms_norm and the rotated key are rounded to q's dtype and written at slot_mapping;
    a quantized cache then quantizes the latent. Neighbours (2 j, 2 j + 1) are a pair, rotated in
    fp32 by the j-th angle of the token's position and rounded, each to its own place (Su et al.,
    RoFormer, 2021).

    Args:
        q: [T, H, N + R], of each head the last R dims are rotated. H may be 0, where only the cache
            is written.
        kv: [T, C + R], the latent, then the key that all heads share.
        weight: [C], of the norm.
        cos, sin: [positions, R / 2] fp32, contiguous.
        positions, slot_mapping: [T] int64. Only the null slot repeats.
        latents: [pages, page_size, C], or quantized.
        ropes: [pages, page_size, R].
        eps: of the norm.

    Returns: the rotated part of q [T, H, R] of its dtype, contiguous.
    """
    rope_dim = ropes.shape[2]
    angles = tuple(table.index_select(0, positions) for table in (cos, sin))
    latent = rms_norm(kv[:, : latents.shape[2]], weight, eps)
    key = _rotate_pairs(kv[:, None, -rope_dim:], *angles)[:, 0]
    write_slots(latents, slot_mapping, latent)
    write_slots(ropes, slot_mapping, key)
    return _rotate_pairs(q[..., -rope_dim:], *angles)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of x [T, H, R] in fp32 by cos, sin [T, R / 2]; the result has x's dtype."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


@op(needed_for="latent attention (MLA)")
def latent_attention(
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
    """Attend with absorbed queries over their rows' cached latents and rotary keys.

    Token i of row s is at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    included, which is already in the cache. A score is (q_latent . latent + q_rope . rope) * scale,
    one sum over C + R, latent first. Keys are cut into splits at absolute multiples of KV_SPLIT,
    which are combined in ascending order, as in paged_attention. A quantized cache gives the bits
    of the same cache dequantized. Where latents are rotated, q_latent is in the same rotation, and
    so is the result.

    Args:
        q_latent: [T, H, C], queries times the absorbed key projection.
        q_rope: [T, H, R].
        latents: [pages, page_size, C], or quantized.
        ropes: [pages, page_size, R].
        page_table: [S, P] int32.
        cu_seqlens: [S + 1] int32, the first token of each row in q.
        starts: [S] int32, the tokens of each row that are cached already.
        query_len: maximum tokens of a row, a static bound.
        scale: factor of the scores.

    Returns: [T, H, C] of q's dtype, the input of the absorbed value projection.
    """
    out = torch.empty_like(q_latent)
    bounds = cu_seqlens.tolist()
    queries = torch.cat([q_latent, q_rope], -1).float() * scale
    latents = dequantize(latents, q_latent.dtype)
    for s, start in enumerate(starts.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if tokens.start == tokens.stop:
            continue
        end = start + tokens.stop - tokens.start
        values = _gather_tokens(latents, page_table[s], end)
        keys = torch.cat([values, _gather_tokens(ropes, page_table[s], end)], -1)
        for h in range(out.shape[1]):
            attended = _attend(queries[tokens, h], keys, values, torch.arange(start, end))
            out[tokens, h] = attended.to(out.dtype)
    return out


def _gather_tokens(cache: Tensor, pages: Tensor, tokens: int) -> Tensor:
    """Gather a row's first tokens from a cache [pages, page_size, D].

    Returns: [splits * KV_SPLIT, D] fp32, zero-padded to a whole split.
    """
    used = -(-tokens // cache.shape[1])
    gathered = cache[pages[:used].long()].flatten(0, 1)[:tokens].float()
    return F.pad(gathered, (0, 0, 0, -tokens % KV_SPLIT))


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attend with scaled queries q [N, C + R] at positions [N].

    keys [splits * KV_SPLIT, C + R], values [splits * KV_SPLIT, C]. Weights and sums of a split are
    fp32. Splits are added in fp64 and rounded once.

    Returns: [N, C] fp32.
    """
    # Maximum of a split in which a query sees no key: exp gives zeros, not NaN.
    min_score = torch.finfo(torch.float32).min
    maxima: list[Tensor] = []
    sums: list[Tensor] = []
    outputs: list[Tensor] = []
    for first_key in range(0, len(keys), KV_SPLIT):
        split = slice(first_key, first_key + KV_SPLIT)
        # Row tiles keep a row's bits independent of the number of rows (row_tiles.py).
        scores = tiled_mm(q, keys[split].t().contiguous())
        hidden = torch.arange(first_key, first_key + KV_SPLIT) > positions[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        maximum = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - maximum.clamp_min(min_score))
        maxima.append(maximum)
        sums.append(weights.sum(-1, keepdim=True))
        outputs.append(tiled_mm(weights, values[split].contiguous()))
    all_max = torch.stack(maxima).amax(0)
    total_output = torch.zeros(outputs[0].shape, dtype=torch.float64)
    total_sum = torch.zeros(len(q), 1, dtype=torch.float64)
    for maximum, split_sum, output in zip(maxima, sums, outputs, strict=True):
        scale = torch.exp(maximum - all_max)
        total_output += output * scale
        total_sum += split_sum * scale
    return total_output.float() / total_sum.float()
