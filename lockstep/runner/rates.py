"""How fast a device moves bytes and multiplies, at best: what floors are computed with."""

from dataclasses import dataclass
from math import inf

import torch

from lockstep.runner.step_timer import StepTimer

COPIED_BYTES = 64 << 20
"""More than caches hold, of which a GPU has tens of MiB."""
COPIES = 5


@dataclass(frozen=True)
class Rates:
    """memory: bytes/s, read and written ones both counted. matrix: flop/s of products; infinite
    where nobody measured them, so that bytes alone decide."""

    memory: float
    matrix: float = inf

    def seconds(self, moved: float, flops: float) -> float:
        """The least time: bytes and flops go on at once, so the longer of the two decides."""
        return max(moved / self.memory, flops / self.matrix)


H200 = Rates(memory=4.3e12, matrix=790e12)
"""Of a copy, and of bf16 products on random data, as measured."""


def rates_of(device: str) -> Rates:
    """Those of this machine's device, "cpu" or "cuda": an H200's as above.

    Of any other the memory's alone, by the best of a few copies made now, which take some ten ms.
    """
    if device == "cuda" and "H200" in torch.cuda.get_device_name():
        return H200
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = inf
    for _ in range(COPIES):
        timer = StepTimer(device)
        target.copy_(source)
        timer.end()
        timer.wait()
        best = min(best, timer.ms)
    return Rates(2 * COPIED_BYTES / (best / 1e3))
