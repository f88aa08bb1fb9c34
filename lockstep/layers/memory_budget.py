"""Memory budget of a device: allocations are counted before they are made."""

import os

import torch

from lockstep.errors import CapacityError


class MemoryBudget:
    """Counter of the bytes that are about to be allocated on a device.

    An absurd size in a config file, such as 10^18, raises an error here instead of in the
    allocator. bounded: False for models that are built without memory (meta tensors).
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.taken = 0
        self.bounded = True

    @property
    def total(self) -> int:
        """Bytes of memory of the device."""
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def take(self, size: int, what: str, remedy: str) -> None:
        """Reserve `size` bytes for `what`, which the error names together with the remedy.

        Raises:
            CapacityError: they do not fit next to what is reserved already.
        """
        self.taken += size
        if self.bounded and self.taken > self.total:
            raise CapacityError(
                f"{what} needs {size / 2**30:.3g} GiB, {self.taken / 2**30:.3g} with what is "
                f"reserved already; allowed: {self.total / 2**30:.3g} GiB, all memory of this "
                f"{self.device}. {remedy}"
            )
