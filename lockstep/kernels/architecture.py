"""GPU architectures and their shared memory. Kernels choose tile sizes by them, never bits.

docs/kernels/architectures.md describes how tiles shrink on GPUs with less shared memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from lockstep.errors import ConfigError, choice_error

HOPPER = 90
"""Architecture on which tiles are measured. Triton's interpreter uses its tiles too."""
WARP_SIZE = 32
"""Threads of a warp."""
KIB = 1 << 10


@dataclass(frozen=True)
class Architecture:
    """Compute capability of a GPU.

    number: e.g. 86 for sm_86. shared_memory: maximum bytes per CTA. cards: examples of GPUs.
    """

    number: int
    shared_memory: int
    cards: str

    @property
    def name(self) -> str:
        """Name as the compiler spells it, e.g. "sm_86"."""
        return f"sm_{self.number}"


ARCHITECTURES = {
    architecture.number: architecture
    for architecture in (
        Architecture(80, 163 * KIB, "A100"),
        Architecture(86, 99 * KIB, "RTX 30, A5000, A4000"),
        Architecture(89, 99 * KIB, "RTX 40, L4, L40S"),
        Architecture(90, 227 * KIB, "H100, H200"),
        Architecture(100, 227 * KIB, "B200, GB200"),
        Architecture(120, 99 * KIB, "RTX 50, RTX PRO 6000"),
        Architecture(121, 99 * KIB, "GB10"),
    )
}
"""Known architectures, by number.

Source: CUDA C++ Programming Guide, compute capabilities, maximum shared memory per thread block.
"""
MIN_SHARED_MEMORY = min(listed.shared_memory for listed in ARCHITECTURES.values())
"""Bytes of shared memory that an architecture is assumed to have if it is not listed."""


def architecture_by_name(name: str) -> Architecture:
    """Return the architecture with a name such as "sm_86". Raises ConfigError."""
    known = {listed.name: listed for listed in ARCHITECTURES.values()}
    if name not in known:
        allowed = ", ".join(f"{listed.name} ({listed.cards})" for listed in known.values())
        raise choice_error(
            ConfigError, "arch", name, allowed, "Choose the architecture of your GPU."
        )
    return known[name]


def shared_memory_limit(number: int) -> int:
    """Return the bytes of shared memory that a CTA may use on an architecture, e.g. 86."""
    listed = ARCHITECTURES.get(number)
    return MIN_SHARED_MEMORY if listed is None else listed.shared_memory


def fit_stages(stages: int, stage_bytes: int, fixed_bytes: int, number: int) -> int:
    """Return the number of pipeline stages that fit into shared memory: 1 to `stages`.

    stage_bytes: shared memory of one stage. fixed_bytes: shared memory used outside of the
    pipeline. number: the architecture.
    """
    # Triton keeps the stage that is being multiplied in registers: stages - 1 are in shared memory.
    buffers = (shared_memory_limit(number) - fixed_bytes) // stage_bytes
    return max(1, min(stages, 1 + buffers))


H100_MULTIPROCESSORS = 132
"""Streaming multiprocessors (SMs) of an H100 or H200.

Also assumed for CPU tensors and for a GPU that is not present.
"""


def architecture_of(device: torch.device | str) -> Architecture:
    """Return the architecture of a GPU, whether ARCHITECTURES lists it or not."""
    number = sm_number(device)
    return ARCHITECTURES.get(number) or Architecture(
        number, shared_memory_limit(number), "this GPU"
    )


_ASSUMED: ContextVar[Architecture | None] = ContextVar("assumed", default=None)
"""Architecture set by assume_architecture. It replaces the one that the device reports."""


@contextmanager
def assume_architecture(architecture: Architecture) -> Iterator[None]:
    """Treat every GPU as one of this architecture, for plans and dry runs without that GPU."""
    token = _ASSUMED.set(architecture)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def is_architecture_assumed() -> bool:
    """Return whether assume_architecture is active."""
    return _ASSUMED.get() is not None


def sm_number(device: torch.device | str) -> int:
    """Return the architecture number of a device, e.g. 86; HOPPER for a CPU.

    On a CPU, Triton's interpreter runs the kernels with Hopper's tiles.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return HOPPER
    assumed = _ASSUMED.get()
    return _capability(device) if assumed is None else assumed.number


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessor_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of a GPU."""
    if device.type != "cuda" or is_architecture_assumed():
        return H100_MULTIPROCESSORS
    return _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
