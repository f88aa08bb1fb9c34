"""What kernels are given of one side of a cache, packed or not, and whether they can read it."""

from typing import Any, NamedTuple

from torch import Tensor

from lockstep.kernels.kv import KVCache


class Opened(NamedTuple):
    """Tensors and constants of a kernel's launch. load, store: device functions, None where the
    cache is of the model's dtype; beside: numbers of a token and head; the rest as in PackedKV."""

    codes: Tensor
    numbers: Tensor | None = None
    constant: float | None = None
    beside: int = 0
    store: Any = None
    load: Any = None


def opened(cache: KVCache) -> Opened:
    """What a launch passes on."""
    if isinstance(cache, Tensor):
        return Opened(cache)
    codec = cache.codec
    return Opened(cache.codes, cache.numbers, codec.constant, codec.count, *codec.device())


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
