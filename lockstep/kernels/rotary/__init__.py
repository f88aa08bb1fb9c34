"""rope_and_cache: from an attention layer's fused projection to its queries and its cache.

A projection's row holds, head by head, D of q (then D of that head's output gate, where `gated`),
then all k, then all v. H heads, 0 where keys and values alone are wanted; HKV key and value heads.
"""

import torch
from torch import Tensor

from lockstep.kernels.norm import rms_norm
from lockstep.kernels.registry import op


@op(writes=("k_cache", "v_cache"))
def rope_and_cache(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
    offset: float,
    gated: bool,
) -> Tensor:
    """qkv [T, (H (1 + gated) + 2 HKV) D]; q_weight, k_weight [D]; cos, sin [positions, width / 2]
    fp32, contiguous; positions, slot_mapping [T] int64; k_cache, v_cache [pages, page_size, HKV, D]
    -> q [T, H, D] of qkv's dtype, contiguous; k and v are written to the caches at slot_mapping.

    q and k: rms_norm over D (offset + weight), rounded; then the first `width` dims are rotated in
    fp32 in NeoX pairs (j, j + width / 2) and rounded, the rest passes (Su et al., RoFormer, 2021).
    Slots may repeat only if null.
    """
    kv_heads, dim = k_cache.shape[2:]
    q, k, v = _parts(qkv, kv_heads, dim, gated)
    heads = [rms_norm(q, q_weight, eps, offset), rms_norm(k, k_weight, eps, offset)]
    angles = (t.index_select(0, positions) for t in (cos, sin))
    turned = _rotate(torch.cat(heads, dim=1), *angles)
    q, k = turned.split([q.shape[1], kv_heads], dim=1)
    k_cache.view(-1, kv_heads, dim).index_put_((slot_mapping,), k)
    v_cache.view(-1, kv_heads, dim).index_put_((slot_mapping,), v)
    return q.contiguous()


def _parts(qkv: Tensor, kv_heads: int, dim: int, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a projection: q [T, H, D], k and v [T, HKV, D]."""
    width = kv_heads * dim
    rest = qkv.shape[1] - 2 * width
    q, k, v = qkv.split([rest, width, width], dim=-1)
    q = q.unflatten(-1, (rest // ((1 + gated) * dim), (1 + gated) * dim))[..., :dim]
    return q, k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D]; cos, sin [T, width / 2] of its positions -> rotated in fp32, of x's dtype."""
    cos, sin, half = cos[:, None], sin[:, None], cos.shape[1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = ((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype))
    return torch.cat([*turned, x[..., 2 * half :]], dim=-1)
