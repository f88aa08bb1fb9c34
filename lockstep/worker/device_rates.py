"""How fast a device moves bytes and multiplies, at best: what floors are computed with."""

from dataclasses import dataclass
from math import inf

import torch

from lockstep.worker.step_timer import StepTimer

COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Of a copy: more than caches hold. A GPU's hold up to 126 MiB (B200)."""
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


def rates_of(device: str) -> Rates | None:
    """Those of this machine's device, "cpu" or "cuda": an H200's as above.

    Of any other the memory's alone, by the best of a few copies made now, which take some ten ms;
    None where an engine has left no room for them.
    """
    if device == "cuda" and "H200" in torch.cuda.get_device_name():
        return H200
    try:
        return _measured(device)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def _measured(device: str) -> Rates:
    size = COPIED_BYTES[device]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = inf
    for _ in range(COPIES):
        timer = StepTimer(device)
        target.copy_(source)
        timer.end()
        timer.wait()
        best = min(best, timer.ms)
    return Rates(2 * size / (best / 1e3))
