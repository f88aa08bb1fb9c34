"""Memory budget of a device: allocations are counted before they are made."""

import os

import torch

from lockstep.errors import CapacityError


class MemoryBudget:
    """Counts what is about to be allocated. A size of 10^18 ends here, not in the allocator.

    bounded=False: for models that are built without memory.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.taken = 0
        self.bounded = True

    @property
    def total(self) -> int:
        """Bytes of memory that the device has."""
        if self.device == "cuda":
            return torch.cuda.mem_get_info()[1]
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def take(self, size: int, what: str, remedy: str) -> None:
        """Speaks for `size` bytes. Raises CapacityError where they do not fit beside the others."""
        self.taken += size
        if self.bounded and self.taken > self.total:
            raise CapacityError(
                f"{what} needs {size / 2**30:.3g} GiB, {self.taken / 2**30:.3g} with what stands "
                f"before it; allowed: {self.total / 2**30:.3g} GiB, all memory of this "
                f"{self.device}. {remedy}"
            )
