"""Rings of recent tokens: a token's ring slot is its position modulo the ring's length.

What a recurrent mixer needs of the tokens before a step (raw inputs of its convolution, and what
replays pending tokens into the state) stays in such rings, one per row. Nothing is moved or cleaned
up after rejected drafts: the next window overwrites them.
"""

import torch
from torch import Tensor


def ring_slots(window: int, history: int, flush: int = 1) -> int:
    """The length of a ring: a window's tokens never overwrite what is read beside them.

    window: most tokens of a step. history: raw inputs that the convolution reads before a window.
    flush: the state is written once so many tokens are pending, so up to flush - 1 + window may be.
    """
    return window + max(flush - 1 + window, history)


def slots_before(position: int, count: int, length: int) -> Tensor:
    """The ring slots of the `count` tokens before `position`, in a ring of `length`: int64."""
    return torch.arange(position - count, position) % length
