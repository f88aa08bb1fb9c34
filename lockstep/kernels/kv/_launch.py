"""What kernels are given of one side of a cache, packed or not, and whether they can read it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.kv import KVCache


class Opened(NamedTuple):
    """Tensors and constants of a kernel's launch. load, store: device functions, None where the
    cache is of the model's dtype; beside: numbers of a token and head; block: numbers that are
    rotated together, 0 for none; the rest as in PackedKV."""

    codes: Tensor
    numbers: Tensor | None = None
    constant: float | int | None = None
    beside: int = 0
    block: int = 0
    store: Any = None
    load: Any = None


def opened(cache: KVCache, dtype: torch.dtype, assembly: bool = False) -> Opened:
    """What a launch passes on. dtype: the model's; assembly: whether the kernel may hold any."""
    if isinstance(cache, Tensor):
        return Opened(cache)
    codec = cache.codec
    device = codec.device()
    fast = device.load_bf16 is not None and assembly and dtype == torch.bfloat16
    return Opened(
        cache.codes,
        cache.numbers,
        codec.constant,
        codec.count(cache.dim),
        0 if codec.turn is None else codec.turn.size(cache.dim),
        device.store,
        device.load_bf16 if fast else device.load,
    )


def token_bytes(*caches: KVCache) -> int:
    """Bytes of one token and head in packed caches, 0 in others."""
    packed = [
        tensor for cache in caches if not isinstance(cache, Tensor) for tensor in cache.tensors()
    ]
    return sum(tensor.shape[-1] * tensor.dtype.itemsize for tensor in packed)


def unserved(**traits: Any) -> str | None:
    """Why kernels cannot read a layer's cache, or None: a codec without device functions, or one
    that does not take heads of this dim."""
    for codec in traits.get("codecs") or ():
        if codec.device_at is None:
            return f"{type(codec).__name__} has no device functions"
        why_not: str | None = codec.refusal(traits.get("head_dim", 64))
        if why_not is not None:
            return why_not
    return None
