"""Contract and reference of rope_and_cache: from a fused projection to queries and cache.

A projection's row contains, per head, D of q (then D of that head's output gate, where `gated`),
then all k, then all v. H query heads, 0 where only keys and values are wanted; HKV key and value
heads.
"""

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import KVCache, rotate_queries, write_slots
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.registry import op


@op(writes=("k_cache", "v_cache"))
def rope_and_cache(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    eps: float,
    offset: float,
    gated: bool,
) -> Tensor:
    """Norm and rotate queries and keys, and write keys and values to the cache at slot_mapping.

    q and k: rms_norm over D with weights offset + weight, rounded; then the first `width` dims are
    rotated in fp32 in NeoX pairs (j, j + width / 2) and rounded, the rest is unchanged (Su et al.,
    RoFormer, 2021). A quantized cache then quantizes k and v. Where its format rotates keys, q gets
    the same Hadamard rotation (formats.kv.rotate_queries) and is rounded once more.

    Args:
        qkv: [T, (H (1 + gated) + 2 HKV) D].
        q_weight, k_weight: [D]; both None: no norm.
        cos, sin: [positions, width / 2] fp32, contiguous; both None: no rotary embedding.
        positions, slot_mapping: [T] int64. Only the null slot repeats.
        k_cache, v_cache: [pages, page_size, HKV, D], or quantized.
        eps: of the norm.
        offset: added to the norm's weights.
        gated: whether qkv contains output gates.

    Returns: q [T, H, D] of qkv's dtype, contiguous.
    """
    kv_heads, dim = k_cache.shape[2:]
    q, k, v = _parts(qkv, kv_heads, dim, gated)
    if q_weight is not None and k_weight is not None:
        q = rms_norm(q, q_weight, eps, offset)
        k = rms_norm(k, k_weight, eps, offset)
    rotated = _rotate_at(torch.cat([q, k], dim=1), cos, sin, positions)
    q, k = rotated.split([q.shape[1], kv_heads], dim=1)
    write_slots(k_cache, slot_mapping, k)
    write_slots(v_cache, slot_mapping, v)
    q = rotate_queries(q, k_cache)
    return q.contiguous()


def _parts(qkv: Tensor, kv_heads: int, dim: int, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a projection: q [T, H, D], k and v [T, HKV, D]."""
    width = kv_heads * dim
    rest = qkv.shape[1] - 2 * width
    q, k, v = qkv.split([rest, width, width], dim=-1)
    q = q.unflatten(-1, (rest // ((1 + gated) * dim), (1 + gated) * dim))[..., :dim]
    return q, k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, dim))


def _rotate_at(x: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor) -> Tensor:
    """Rotate x [T, H, D] by the angles of its positions; return x if there are no angles."""
    if cos is None or sin is None:
        return x
    angles = (t.index_select(0, positions) for t in (cos, sin))
    return _rotate(x, *angles)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, H, D] in fp32, rounded to its dtype. cos, sin [T, width / 2]: per token."""
    half = cos.shape[1]
    cos = cos[:, None]
    sin = sin[:, None]
    a = x[..., :half].float()
    b = x[..., half : 2 * half].float()
    rotated_a = (a * cos - b * sin).to(x.dtype)
    rotated_b = (b * cos + a * sin).to(x.dtype)
    return torch.cat([rotated_a, rotated_b, x[..., 2 * half :]], dim=-1)
