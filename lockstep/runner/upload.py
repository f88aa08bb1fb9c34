"""From host to device memory in the order of device work, and without waiting for it."""

from torch import Tensor


def upload(x: Tensor, to: Tensor) -> None:
    """Writes x, of the host, over `to`. To a GPU it goes out of pinned memory: from any other,
    torch waits until all that was launched before is done."""
    to.copy_(x.pin_memory() if to.is_cuda else x, non_blocking=True)
