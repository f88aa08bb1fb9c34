"""Storage of attention layers: keys and values, or latents, in the KV cache format."""

import torch
from torch import Tensor

from lockstep.cache.specs import Part, Spec, StorageKind
from lockstep.kernels.formats.kv import KVCache, KVFormat, KVQuantizer, QuantizedKV

SIDES = ("k", "v")
LATENT = "latent"
ROPE = "rope"


def kv_spec(kv_heads: int, dim: int, dtype: torch.dtype, format: KVFormat | None) -> Spec:
    """Return the storage of one layer's keys and values: kv_heads x dim each, per token.

    format: None for values in `dtype`.
    """
    parts = [
        part
        for side in SIDES
        for part in _parts(side, (kv_heads,), dim, dtype, _quantizer(format, side))
    ]
    return Spec(StorageKind.PAGED, tuple(parts))


def latent_spec(dim: int, rope: int, dtype: torch.dtype, quantizer: KVQuantizer | None) -> Spec:
    """Return the storage of one layer's latents.

    Per token: a latent of `dim` values, quantized or in `dtype` without a quantizer, and a rotated
    key of `rope` values, always in `dtype`.
    """
    # The rotated key is short and sensitive to rounding: it is never quantized.
    rotated = Part(ROPE, (rope,), dtype)
    return Spec(StorageKind.PAGED, (*_parts(LATENT, (), dim, dtype, quantizer), rotated))


def kv_caches(
    storage: dict[str, Tensor], dim: int, format: KVFormat | None
) -> tuple[KVCache, KVCache]:
    """Return keys and values over the tensors that kv_spec allocated."""
    k, v = (_cache(storage, side, dim, _quantizer(format, side)) for side in SIDES)
    return k, v


def latent_caches(
    storage: dict[str, Tensor], dim: int, quantizer: KVQuantizer | None
) -> tuple[KVCache, Tensor]:
    """Return latents and rotated keys over the tensors that latent_spec allocated."""
    return _cache(storage, LATENT, dim, quantizer), storage[ROPE]


def kv_tensors(cache: KVCache) -> list[Tensor]:
    """Return the tensors of keys or values, each indexed by page first."""
    return [cache] if isinstance(cache, Tensor) else cache.tensors()


def _quantizer(format: KVFormat | None, side: str) -> KVQuantizer | None:
    return None if format is None else getattr(format, side)


def _parts(
    side: str, lead: tuple[int, ...], dim: int, dtype: torch.dtype, quantizer: KVQuantizer | None
) -> list[Part]:
    """Return the parts of `dim` values for each of `lead` per token."""
    if quantizer is None:
        return [Part(side, (*lead, dim), dtype)]
    parts = [Part(side, (*lead, quantizer.row_width(dim)), quantizer.dtype)]
    count = quantizer.num_scales(dim)
    if count:
        parts.append(Part(_scales_name(side), (*lead, count), quantizer.scale_dtype))
    return parts


def _cache(
    storage: dict[str, Tensor], side: str, dim: int, quantizer: KVQuantizer | None
) -> KVCache:
    """Return keys or values over the tensors of their parts."""
    values = storage[side]
    return (
        values
        if quantizer is None
        else QuantizedKV(quantizer, dim, values, storage.get(_scales_name(side)))
    )


def _scales_name(side: str) -> str:
    """Return the name of the part with a quantizer's scales and zero points."""
    return f"{side}_scales"
