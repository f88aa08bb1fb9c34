"""Rings and convolution of whole batches in few torch calls, whose number costs on a CPU."""

from functools import lru_cache

import torch
from torch import Tensor

from lockstep.kernels.activations import silu


@lru_cache(maxsize=64)
def ring_places(
    length: int, slots: tuple[int, ...], starts: tuple[int, ...], offsets: range
) -> Tensor:
    """Where the tokens at starts + offsets are in ring.flatten(0, 1), by offset, then by row.

    length: of a ring; slots, starts: each row's state slot and first position. Cached, since every
    layer of a step asks for the same places and making them takes 20 us.
    """
    rows = list(zip(slots, starts, strict=True))
    return torch.tensor([s * length + (p + i) % length for i in offsets for s, p in rows])


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """See lockstep.kernels.recurrent.convolution. All taps are multiplied in one call."""
    taps = weight.float().t()
    x = x.float()
    shape = (len(x) - len(taps) + 1, *x.shape[1:])
    windows = x.as_strided((len(taps), *shape), (x.stride(0), *x.stride()))
    total, *others = (windows * taps.view(-1, *[1] * (x.dim() - 1), x.shape[-1])).unbind(0)
    for product in others:
        total.add_(product)
    return silu(total)
