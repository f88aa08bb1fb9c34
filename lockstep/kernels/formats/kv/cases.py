"""Caches in every format for the cases of the ops that read and write them."""

import torch
from torch import Tensor

from lockstep.kernels.formats.kv import Codec, KVCache, KVFormat, PackedKV, turn_of, unpacked
from lockstep.kernels.formats.kv.fp8 import Fp8
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.kernels.formats.kv.unquantized import Plain

SCALED = KVFormat("fp8_e4m3 scaled", Fp8("e4m3", 0.03), Fp8("e4m3", 0.7))
"""With static scales, as a checkpoint may have them."""
NAMED = {f.name: f.of_layer("layers.3") for f in KV_FORMATS.values() if f.k.device_at}
NAMED |= {SCALED.name: SCALED}
"""The formats that kernels read, each once, as a layer has them."""
LATENTS = {name: f.latent for name, f in NAMED.items() if f.latent and f.latent.device_at}
"""The codecs of latents that kernels read, as a layer has them."""
NAN_CODE = 0x7F
"""What codes are filled with: NaN where they stand alone."""


def fits(format: KVFormat | None, dim: int) -> bool:
    """Whether heads of this dim can be stored so."""
    return format is None or not (format.k.refusal(dim) or format.v.refusal(dim))


def empty_cache(
    shape: tuple[int, ...], dtype: torch.dtype, format: KVFormat | None
) -> tuple[KVCache, KVCache]:
    """Keys and values [pages, page_size, Hkv, D] that nobody has written: all NaN."""
    if format is None:
        return empty_side(shape, dtype, None), empty_side(shape, dtype, None)
    return empty_side(shape, dtype, format.k), empty_side(shape, dtype, format.v)


def empty_side(shape: tuple[int, ...], dtype: torch.dtype, codec: Codec | None) -> KVCache:
    """One side of a cache [pages, page_size, .., D] that nobody has written: all NaN."""
    return torch.full(shape, torch.nan, dtype=dtype) if codec is None else _packed(shape, codec)


def plain(cache: KVCache, dtype: torch.dtype) -> KVCache:
    """The same cache unpacked: a tensor, or, where its numbers are rotated, one that says so."""
    turn = turn_of(cache)
    numbers = unpacked(cache, dtype)
    return numbers if turn is None else PackedKV(Plain(dtype, turn), numbers.shape[-1], numbers)


def _packed(shape: tuple[int, ...], codec: Codec) -> PackedKV:
    (*lead, dim) = shape
    fill = torch.nan if codec.dtype.is_floating_point else NAN_CODE
    codes = torch.full((*lead, codec.width(dim)), fill, dtype=codec.dtype)
    numbers: Tensor | None = None
    if codec.count(dim):
        numbers = torch.full((*lead, codec.count(dim)), torch.nan, dtype=codec.number_dtype)
    return PackedKV(codec, dim, codes, numbers)
