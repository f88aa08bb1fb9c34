"""How references and CPU backends read and write one side of a cache, packed or not."""

import torch
from torch import Tensor

from lockstep.kernels.kv._packed import Codec, KVCache, PackedKV


def codecs_of(k_cache: KVCache, v_cache: KVCache) -> tuple[Codec, Codec] | None:
    """The trait `codecs` of a layer with such caches: None where they are not packed."""
    if isinstance(k_cache, PackedKV) and isinstance(v_cache, PackedKV):
        return k_cache.codec, v_cache.codec
    return None


def unpacked(cache: KVCache, dtype: torch.dtype) -> Tensor:
    """All of it [pages, page_size, Hkv, D] in the model's dtype."""
    if isinstance(cache, Tensor):
        return cache
    return cache.codec.decode(cache.codes, cache.numbers).to(dtype)


def read_pages(cache: KVCache, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages [N] of it, unpacked: [N, page_size, Hkv, D] of the model's dtype."""
    if isinstance(cache, Tensor):
        return cache.index_select(0, pages)
    found = [tensor.index_select(0, pages) for tensor in cache.tensors()]
    return unpacked(PackedKV(cache.codec, cache.dim, *found), dtype)


def write_slots(cache: KVCache, slots: Tensor, x: Tensor) -> None:
    """Writes x [T, Hkv, D] to slots [T], which may repeat only if null."""
    if isinstance(cache, Tensor):
        cache.view(-1, *x.shape[1:]).index_put_((slots,), x)
        return
    for own, new in zip(cache.tensors(), cache.codec.encode(x), strict=True):
        own.view(-1, *new.shape[1:]).index_put_((slots,), new)
