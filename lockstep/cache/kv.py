"""What attention keeps: one side each for keys and values, as the KV format has them."""

import torch
from torch import Tensor

from lockstep.cache.specs import Law, Part, Spec
from lockstep.kernels.kv import Codec, KVCache, KVFormat, PackedKV

SIDES = ("k", "v")


def kv_spec(kv_heads: int, dim: int, dtype: torch.dtype, format: KVFormat | None) -> Spec:
    """Keys and values of one layer: kv_heads x dim each, per token. format: None where they are of
    the dtype."""
    return Spec(
        Law.PAGED,
        tuple(p for side in SIDES for p in _parts(side, kv_heads, dim, dtype, format)),
    )


def _parts(
    side: str, kv_heads: int, dim: int, dtype: torch.dtype, format: KVFormat | None
) -> list[Part]:
    if format is None:
        return [Part(side, (kv_heads, dim), dtype)]
    codec: Codec = getattr(format, side)
    parts = [Part(side, (kv_heads, codec.width(dim)), codec.dtype)]
    count = codec.count(dim)
    if count:
        parts.append(Part(f"{side}_numbers", (kv_heads, count), codec.number_dtype))
    return parts


def kv_caches(
    storage: dict[str, Tensor], dim: int, format: KVFormat | None
) -> tuple[KVCache, KVCache]:
    """Keys and values over the tensors that kv_spec allocated."""
    if format is None:
        return storage["k"], storage["v"]
    k, v = (
        PackedKV(getattr(format, side), dim, storage[side], storage.get(f"{side}_numbers"))
        for side in SIDES
    )
    return k, v


def kv_tensors(cache: KVCache) -> list[Tensor]:
    """The tensors of one side, each indexed by page first."""
    return [cache] if isinstance(cache, Tensor) else cache.tensors()
