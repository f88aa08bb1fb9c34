"""What kernels are given of one side of a cache, packed or not, and whether they can read it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.compile_target import NATIVE_FP8, CompileTarget
from lockstep.kernels.formats.kv import Codec, KVCache, KVDevice


class Opened(NamedTuple):
    """Tensors and constants of a kernel's launch. store, fetch, unpack: device functions, None
    where the cache is of the model's dtype; share: as in KVDevice; beside: numbers of a token and
    head; block: numbers that are rotated together, 0 for none; the rest as in PackedKV."""

    codes: Tensor
    numbers: Tensor | None = None
    constant: float | int | None = None
    beside: int = 0
    block: int = 0
    store: Any = None
    share: int = 1
    fetch: Any = None
    unpack: Any = None


def opened(cache: KVCache, dtype: torch.dtype, target: CompileTarget | None = None) -> Opened:
    """What a launch passes on. dtype: the model's; target: None for a kernel that only stores."""
    if isinstance(cache, Tensor):
        return Opened(cache)
    codec = cache.codec
    device = codec.device()
    return Opened(
        cache.codes,
        cache.numbers,
        codec.constant,
        codec.count(cache.dim),
        0 if codec.turn is None else codec.turn.size(cache.dim),
        device.store,
        device.share,
        device.fetch,
        _unpacker(device, dtype, target),
    )


def _unpacker(device: KVDevice, dtype: torch.dtype, target: CompileTarget | None) -> Any:
    """The fastest way of unpacking that a target has."""
    if target is None or not target.inline_ptx or dtype != torch.bfloat16:
        return device.unpack
    native = device.unpack_native if target.arch >= NATIVE_FP8 else None
    return native or device.unpack_bf16 or device.unpack


def token_bytes(*caches: KVCache) -> int:
    """Bytes of one token and head in packed caches, 0 in others."""
    packed = [
        tensor for cache in caches if not isinstance(cache, Tensor) for tensor in cache.tensors()
    ]
    return sum(tensor.shape[-1] * tensor.dtype.itemsize for tensor in packed)


def unserved(dim: int, codecs: tuple[Codec, ...] | None = None, **traits: Any) -> str | None:
    """Why kernels cannot read a layer's cache, or None: a codec without device functions, or one
    that does not take heads of this dim."""
    for codec in codecs or ():
        if codec.device_at is None:
            return f"{type(codec).__name__} has no device functions"
        why_not = codec.refusal(dim)
        if why_not is not None:
            return why_not
    return None
