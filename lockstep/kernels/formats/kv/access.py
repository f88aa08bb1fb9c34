"""Reads and writes of one side of a cache, quantized or not, for references and CPU backends."""

from typing import TypeGuard

import torch
from torch import Tensor

from lockstep.kernels.formats.kv.contract import KVCache, KVQuantizer, QuantizedKV
from lockstep.kernels.formats.kv.hadamard import HadamardRotation


def quantizers_of(*caches: KVCache) -> tuple[KVQuantizer, ...] | None:
    """Return the trait `quantizers` of a layer with these caches; None: they are not quantized."""
    return tuple(cache.quantizer for cache in caches if isinstance(cache, QuantizedKV)) or None


def is_dense(cache: KVCache) -> TypeGuard[Tensor]:
    """Return whether a cache is a contiguous tensor of the model's dtype."""
    return isinstance(cache, Tensor) and cache.is_contiguous()


def rotation_of(cache: KVCache) -> HadamardRotation | None:
    """Return the rotation that the numbers of a cache are stored in, or None."""
    return cache.quantizer.rotation if isinstance(cache, QuantizedKV) else None


def rotate_queries(q: Tensor, k_cache: KVCache) -> Tensor:
    """Rotate queries q [..., D] as the keys of the cache are rotated, rounded to their dtype."""
    rotation = rotation_of(k_cache)
    return q if rotation is None else rotation.rotate(q).to(q.dtype)


def rotate_back(x: Tensor, v_cache: KVCache) -> Tensor:
    """Rotate weighted sums x [..., D] fp32 of the cache's values back out of their rotation."""
    rotation = rotation_of(v_cache)
    return x if rotation is None else rotation.rotate_back(x)


def dequantize(cache: KVCache, dtype: torch.dtype) -> Tensor:
    """Dequantize a whole cache to the model's dtype; values stay in its rotation."""
    if isinstance(cache, Tensor):
        return cache
    return cache.quantizer.dequantize(cache.qdata, cache.scales).to(dtype)


def read_pages(cache: KVCache, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the pages [N] of a cache: [N, page_size, ..] of the model's dtype."""
    if isinstance(cache, Tensor):
        return cache.index_select(0, pages)
    selected = [tensor.index_select(0, pages) for tensor in cache.tensors()]
    return dequantize(QuantizedKV(cache.quantizer, cache.dim, *selected), dtype)


def write_slots(cache: KVCache, slots: Tensor, x: Tensor) -> None:
    """Write x [T, Hkv, D], or latents [T, C], to slots [T], of which only the null slot repeats."""
    if isinstance(cache, Tensor):
        cache.view(-1, *x.shape[1:]).index_put_((slots,), x)
        return
    for stored, new in zip(cache.tensors(), cache.quantizer.quantize(x), strict=True):
        stored.view(-1, *new.shape[1:]).index_put_((slots,), new)
