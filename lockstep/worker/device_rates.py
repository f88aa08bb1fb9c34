"""Peak rates of a device, from which step floors are computed."""

from dataclasses import dataclass
from math import inf

import torch

from lockstep.worker.step_timer import StepTimer

COPIED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of the measured copy: more than caches hold. A GPU's hold up to 126 MiB (B200)."""
COPIES = 5


@dataclass(frozen=True)
class ExchangeRate:
    """Rate of exchanges between tensor-parallel ranks. latency: seconds that each one takes.
    bandwidth: bytes/s that a rank receives on top of it.
    """

    latency: float
    bandwidth: float = inf

    def seconds(self, count: int, received: float) -> float:
        """Return the minimum time of `count` exchanges that bring `received` bytes in total."""
        return count * self.latency + received / self.bandwidth


EXCHANGE_RATES = {
    "push": ExchangeRate(latency=2.6e-6, bandwidth=480e9),
    "nccl": ExchangeRate(latency=10.9e-6, bandwidth=98e9),
}
"""Rates by backend of the op exchange, between two H200s over NVLink, in CUDA graphs of 64.

push: kernels that write their columns to the peer and wait for its own, without a launch for the
exchange; rows of 5,120 columns in bf16 took 2.58 us with 1 row and 3.25 us with 64. nccl: 10.9 us
with 1 row, and 56.3 us with 256 rows of 17,408 columns (docs/kernels/exchange.md).
"""


@dataclass(frozen=True)
class Rates:
    """Peak rates. memory: bytes/s, reads and writes counted. matrix: FLOP/s of matrix products;
    infinite where unknown, so that bytes alone decide. exchange: of tensor-parallel ranks; free
    where unknown.
    """

    memory: float
    matrix: float = inf
    exchange: ExchangeRate = ExchangeRate(latency=0.0)

    def seconds(self, moved: float, flops: float) -> float:
        """Return the minimum time: memory and matrix units overlap, so the slower one decides."""
        return max(moved / self.memory, flops / self.matrix)


H200 = Rates(memory=4.3e12, matrix=790e12, exchange=EXCHANGE_RATES["push"])
"""Rates of an H200, measured with a copy and with bf16 products of random data."""


def rates_of(device: str) -> Rates | None:
    """Return the rates of this machine's device, "cpu" or "cuda".

    For devices other than an H200 only memory is measured, by the best of a few copies (tens of
    ms). None where an engine has left no memory for the copies.
    """
    if device == "cuda" and "H200" in torch.cuda.get_device_name():
        return H200
    try:
        return measured_rates(device)
    except torch.OutOfMemoryError:
        return None
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def measured_rates(device: str) -> Rates:
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
