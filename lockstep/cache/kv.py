"""What attention keeps: keys and values, or latents, as the KV format has them."""

import torch
from torch import Tensor

from lockstep.cache.specs import Law, Part, Spec
from lockstep.kernels.formats.kv import KVCache, KVFormat, KVQuantizer, QuantizedKV

SIDES = ("k", "v")
LATENT = "latent"
ROPE = "rope"


def kv_spec(kv_heads: int, dim: int, dtype: torch.dtype, format: KVFormat | None) -> Spec:
    """Keys and values of one layer: kv_heads x dim each, per token. format: None where they are of
    the dtype."""
    parts = [
        part
        for side in SIDES
        for part in _parts(side, (kv_heads,), dim, dtype, _codec(format, side))
    ]
    return Spec(Law.PAGED, tuple(parts))


def latent_spec(dim: int, rope: int, dtype: torch.dtype, quantizer: KVQuantizer | None) -> Spec:
    """Latents of one layer: per token one of `dim` numbers, as the codec has it, None where it is
    of the dtype, and beside it a turned key of `rope` numbers, of the dtype always."""
    turned = Part(ROPE, (rope,), dtype)
    return Spec(Law.PAGED, (*_parts(LATENT, (), dim, dtype, quantizer), turned))


def kv_caches(
    storage: dict[str, Tensor], dim: int, format: KVFormat | None
) -> tuple[KVCache, KVCache]:
    """Keys and values over the tensors that kv_spec allocated."""
    k, v = (_cache(storage, side, dim, _codec(format, side)) for side in SIDES)
    return k, v


def latent_caches(
    storage: dict[str, Tensor], dim: int, quantizer: KVQuantizer | None
) -> tuple[KVCache, Tensor]:
    """Latents and turned keys over the tensors that latent_spec allocated."""
    return _cache(storage, LATENT, dim, quantizer), storage[ROPE]


def kv_tensors(cache: KVCache) -> list[Tensor]:
    """The tensors of one side, each indexed by page first."""
    return [cache] if isinstance(cache, Tensor) else cache.tensors()


def _codec(format: KVFormat | None, side: str) -> KVQuantizer | None:
    return None if format is None else getattr(format, side)


def _parts(
    side: str, lead: tuple[int, ...], dim: int, dtype: torch.dtype, quantizer: KVQuantizer | None
) -> list[Part]:
    """A side of dim numbers for each of `lead` per token."""
    if quantizer is None:
        return [Part(side, (*lead, dim), dtype)]
    parts = [Part(side, (*lead, quantizer.row_width(dim)), quantizer.dtype)]
    count = quantizer.num_scales(dim)
    if count:
        parts.append(Part(_beside(side), (*lead, count), quantizer.scale_dtype))
    return parts


def _cache(
    storage: dict[str, Tensor], side: str, dim: int, quantizer: KVQuantizer | None
) -> KVCache:
    """A side over the tensors of its parts."""
    codes = storage[side]
    return (
        codes
        if quantizer is None
        else QuantizedKV(quantizer, dim, codes, storage.get(_beside(side)))
    )


def _beside(side: str) -> str:
    """The name of the part with the numbers beside a side's codes."""
    return f"{side}_numbers"
