"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over paged latents, absorbed.

A token keeps one latent [C], the normed one, and one rotated key [R] that all heads share. With
the up-projections absorbed into queries and outputs, every head attends to the same key
[latent, rope] and takes the latent as its value: one KV head of width C + R, values of width C.
The fold is paged_attention's, so a token's bits depend on its own prefix alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.attention import SEGMENT
from lockstep.kernels.formats.kv import KVCache, unpacked, write_slots
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tiled_mm


@op(writes=("latents", "ropes"))
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
    """q [T, H, N + R], of each head's dims the last R turn; kv [T, C + R]: the latent, then the key
    that all heads share; weight [C]; cos, sin [positions, R / 2] fp32, contiguous; positions,
    slot_mapping [T] int64; latents [pages, page_size, C], ropes [pages, page_size, R]
    -> the turned part of q [T, H, R] of its dtype, contiguous. The latent's rms_norm and the turned
    key are written to latents and ropes at slot_mapping, rounded to q's dtype; the latent then in
    the format of latents where they are packed.

    Neighbours (2j, 2j + 1) are a pair, turned in fp32 by the j-th angle of the token's position and
    rounded, each to its own place (Su et al., RoFormer, 2021). H may be 0, where the cache alone is
    wanted. Slots may repeat only if null.
    """
    width = ropes.shape[2]
    angles = tuple(table.index_select(0, positions) for table in (cos, sin))
    latent = rms_norm(kv[:, : latents.shape[2]], weight, eps)
    key = _turn_pairs(kv[:, None, -width:], *angles)[:, 0]
    write_slots(latents, slot_mapping, latent)
    write_slots(ropes, slot_mapping, key)
    return _turn_pairs(q[..., -width:], *angles)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, R]; cos, sin [T, R / 2] of its positions -> turned in fp32, of x's dtype."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


@op
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
    """q_latent [T, H, C] (queries times the absorbed key projection), q_rope [T, H, R]; latents
    [pages, page_size, C], ropes [pages, page_size, R], all of one dtype, or latents packed, which
    is the same as unpacked to it; page_table [S, P] int32; cu_seqlens [S+1] int32; starts [S] int32
    -> [T, H, C] of q's dtype: latents weighed by softmax, the input of the absorbed value
    projection. Where latents lie in a rotation, q_latent must, and so does what is found.

    Token i of row s sits at position starts[s] + i and sees keys 0 .. starts[s] + i, its own
    among them (already written), and no key behind it: decoding, verification and prompts alike.
    query_len: the most tokens a row brings (a static bound). A score is
    (q_latent . latent + q_rope . rope) * scale, one sum over C + R, latent first. Keys are cut at
    absolute multiples of SEGMENT and segments folded in ascending order, as in paged_attention.
    """
    out = torch.empty_like(q_latent)
    bounds = cu_seqlens.tolist()
    queries = torch.cat([q_latent, q_rope], -1).float() * scale
    latents = unpacked(latents, q_latent.dtype)
    for s, start in enumerate(starts.tolist()):
        tokens = slice(bounds[s], bounds[s + 1])
        if tokens.start == tokens.stop:
            continue
        end = start + tokens.stop - tokens.start
        values = _first_tokens(latents, page_table[s], end)
        keys = torch.cat([values, _first_tokens(ropes, page_table[s], end)], -1)
        for h in range(out.shape[1]):
            found = _attend(queries[tokens, h], keys, values, torch.arange(start, end))
            out[tokens, h] = found.to(out.dtype)
    return out


def _first_tokens(cache: Tensor, pages: Tensor, tokens: int) -> Tensor:
    """What a cache [pages, page_size, D] holds of a row's first tokens, zeros behind them up to a
    whole segment: [segments * SEGMENT, D] fp32."""
    used = -(-tokens // cache.shape[1])
    found = cache[pages[:used].long()].flatten(0, 1)[:tokens].float()
    return F.pad(found, (0, 0, 0, -tokens % SEGMENT))


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """q [N, C + R] scaled, at positions [N]; keys [segments * SEGMENT, C + R], values
    [segments * SEGMENT, C] -> [N, C].

    Weights and sums of a segment are fp32; segments are added in fp64 and rounded once.
    """
    lowest = torch.finfo(torch.float32).min  # of a segment in which a query sees no key
    tops: list[Tensor] = []
    norms: list[Tensor] = []
    parts: list[Tensor] = []
    for first in range(0, len(keys), SEGMENT):
        segment = slice(first, first + SEGMENT)
        scores = tiled_mm(q, keys[segment].t().contiguous())
        unseen = torch.arange(first, first + SEGMENT) > positions[:, None]
        scores = scores.masked_fill(unseen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top.clamp_min(lowest))
        tops.append(top)
        norms.append(weights.sum(-1, keepdim=True))
        parts.append(tiled_mm(weights, values[segment].contiguous()))
    best = torch.stack(tops).amax(0)
    total = torch.zeros(parts[0].shape, dtype=torch.float64)
    norm = torch.zeros(len(q), 1, dtype=torch.float64)
    for top, segment_norm, part in zip(tops, norms, parts, strict=True):
        faded = torch.exp(top - best)
        total += part * faded
        norm += segment_norm * faded
    return total.float() / norm.float()
