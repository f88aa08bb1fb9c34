"""Peak rates of a device, from which step floors are computed."""

from dataclasses import dataclass
from math import inf

import torch

from lockstep.worker.step_timer import StepTimer

COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the measured copy: more than caches hold. A GPU's hold up to 126 MiB (B200)."""
COPIES = 5


@dataclass(frozen=True)
class Rates:
    """Peak rates. memory: bytes/s, reads and writes counted. matrix: FLOP/s of matrix products;
    infinite where unknown, so that bytes alone decide.
    """

    memory: float
    matrix: float = inf

    def seconds(self, moved: float, flops: float) -> float:
        """Return the minimum time: memory and matrix units overlap, so the slower one decides."""
        return max(moved / self.memory, flops / self.matrix)


H200 = Rates(memory=4.3e12, matrix=790e12)
"""Rates of an H200, measured with a copy and with bf16 products of random data."""


def rates_of(device: str) -> Rates | None:
    """Return the rates of this machine's device, "cpu" or "cuda".

    For devices other than an H200 only memory is measured, by the best of a few copies (tens of
    ms). None where an engine has left no memory for the copies.
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
    """Measure the memory rate of a device."""
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
