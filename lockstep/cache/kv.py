"""Storage of attention layers: keys and values, or latents, in the KV cache format.

A mixer declares its parts with a function `..._spec`. The cache allocates each part as a tensor
[P, page_size, *shape of a token], and a function `..._caches` wraps these tensors for the kernels.
"""

import torch
from torch import Tensor

from lockstep.cache.specs import Part, Spec, StorageKind
from lockstep.kernels.formats.kv import KVCache, KVFormat, KVQuantizer, QuantizedKV

SIDES = ("k", "v")
LATENT = "latent"
ROPE = "rope"
"""Names of the parts that hold values. A quantized part has its scales in another part."""


def kv_spec(kv_heads: int, dim: int, dtype: torch.dtype, format: KVFormat | None) -> Spec:
    """Return the storage of one layer's keys and values, each [kv_heads, dim] per token.

    format: quantizers of both sides; None for values in `dtype`.
    """
    parts = [
        part
        for side in SIDES
        for part in _parts(side, (kv_heads,), dim, dtype, _quantizer(format, side))
    ]
    return Spec(StorageKind.PAGED, tuple(parts))


def latent_spec(dim: int, rope: int, dtype: torch.dtype, quantizer: KVQuantizer | None) -> Spec:
    """Return the storage of one layer's latents.

    A token has a latent [dim], quantized or in `dtype` without a quantizer, and a rotated key
    [rope], always in `dtype`.
    """
    # The rotated key is short and sensitive to rounding, so it is never quantized.
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
    """Return the quantizer of a side ("k" or "v"); None for an unquantized cache."""
    return None if format is None else getattr(format, side)


def _parts(
    side: str, lead: tuple[int, ...], dim: int, dtype: torch.dtype, quantizer: KVQuantizer | None
) -> list[Part]:
    """Return the parts of values [*lead, dim] per token: the values, and their scales if any."""
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
