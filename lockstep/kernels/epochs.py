"""Epochs of launches. They separate the data of one launch from what others left in memory.

A CTA that hands partial sums to another one marks them with the epoch of the launch, and the
other one waits for that mark. The host gives each launch a serial number. A replay of a CUDA graph
repeats the serial numbers of its launches, so a graph begins with `advance`, which counts replays
on the device. The pair (generation, serial) is unique without any work of the host at a replay.
"""

import itertools
from functools import cache

import torch

from lockstep.kernels import architecture

SERIALS = 2**31 - 1
"""Serial numbers before they repeat: each of them is a positive int32, as a kernel takes it."""


class LaunchEpochs:
    """Source of the epochs of one device.

    generation [1] int64, on the device: replays of all graphs that begin with `advance`.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # others may count outside of inference mode
            self.generation = torch.zeros(1, dtype=torch.int64, device=device)
        self._launches = itertools.count()  # next() is atomic: several threads may launch

    def next_serial(self) -> int:
        """Return the serial number of the next launch, 1 to SERIALS."""
        return 1 + next(self._launches) % SERIALS

    def advance(self) -> None:
        """Begin a new generation, in the order of the current stream."""
        self.generation.add_(1)


def launch_epochs(device: torch.device) -> LaunchEpochs:
    """Return the source of epochs of a device, one for all launches on it.

    The first call allocates the counter: it must come before a capture.
    """
    if architecture.is_architecture_assumed():
        return LaunchEpochs(device)  # a dry run's counter has no memory, so no launch may use it
    return _of_device(device)


@cache
def _of_device(device: torch.device) -> LaunchEpochs:
    return LaunchEpochs(device)
