"""How references and CPU backends read and write one side of a cache, packed or not."""

import torch
from torch import Tensor

from lockstep.kernels.formats.kv.contract import Codec, KVCache, PackedKV
from lockstep.kernels.formats.kv.hadamard import Turn


def codecs_of(*caches: KVCache) -> tuple[Codec, ...] | None:
    """The trait `codecs` of a layer with such caches: None where they are not packed."""
    return tuple(cache.codec for cache in caches if isinstance(cache, PackedKV)) or None


def turn_of(cache: KVCache) -> Turn | None:
    """The rotation that the numbers of such a cache lie in, None where they lie in none."""
    return cache.codec.turn if isinstance(cache, PackedKV) else None


def turned(x: Tensor, cache: KVCache) -> Tensor:
    """Queries x [..., D] rotated as the keys of such a cache are, and rounded to their dtype."""
    turn = turn_of(cache)
    return x if turn is None else turn.forward(x).to(x.dtype)


def turned_back(x: Tensor, cache: KVCache) -> Tensor:
    """Sums x [..., D] fp32 of values of such a cache, out of the rotation that these lie in."""
    turn = turn_of(cache)
    return x if turn is None else turn.back(x)


def unpacked(cache: KVCache, dtype: torch.dtype) -> Tensor:
    """All of it in the model's dtype, of its shape, in the rotation of its codec."""
    if isinstance(cache, Tensor):
        return cache
    return cache.codec.decode(cache.codes, cache.numbers).to(dtype)


def read_pages(cache: KVCache, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages [N] of it, unpacked: [N, page_size, ..] of the model's dtype."""
    if isinstance(cache, Tensor):
        return cache.index_select(0, pages)
    found = [tensor.index_select(0, pages) for tensor in cache.tensors()]
    return unpacked(PackedKV(cache.codec, cache.dim, *found), dtype)


def write_slots(cache: KVCache, slots: Tensor, x: Tensor) -> None:
    """Writes x [T, Hkv, D], or latents [T, C], to slots [T], which may repeat only if null."""
    if isinstance(cache, Tensor):
        cache.view(-1, *x.shape[1:]).index_put_((slots,), x)
        return
    for own, new in zip(cache.tensors(), cache.codec.encode(x), strict=True):
        own.view(-1, *new.shape[1:]).index_put_((slots,), new)
