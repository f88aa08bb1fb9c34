"""Copies between host and device in stream order, without waiting for the device."""

import torch
from torch import Tensor


def copy_to_device(x: Tensor | float, to: Tensor) -> None:
    """Copy a host tensor or a number into the device tensor `to`, in the current stream."""
    if isinstance(x, Tensor):
        # A copy from memory that is not pinned would wait for all work launched before it.
        to.copy_(x.pin_memory() if to.is_cuda else x, non_blocking=True)
    else:
        # fill_ passes the number as a kernel argument; `to[...] = x` would synchronize.
        to.fill_(x)


def copy_to_host(x: Tensor) -> Tensor:
    """Start a copy of a device tensor into host memory. It is complete when the stream gets there.

    Returns the host tensor, pinned if x is on a GPU.
    """
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=True)
