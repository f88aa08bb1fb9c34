"""GPU architectures: what a kernel may use on each. Tiles are chosen by it; no bit depends on them.

docs/kernels/architectures.md has the rule by which tiles fall back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from lockstep.errors import ConfigError, choice_error

HOPPER = 90
"""The architecture that tiles are measured on, and the one whose tiles the interpreter runs."""
KIB = 1 << 10


@dataclass(frozen=True)
class Architecture:
    """shared: bytes of shared memory that a program may have; cards: some that have it."""

    number: int
    shared: int
    cards: str

    @property
    def name(self) -> str:
        """E.g. "sm_86"."""
        return f"sm_{self.number}"


ARCHITECTURES = {
    one.number: one
    for one in (
        Architecture(80, 163 * KIB, "A100"),
        Architecture(86, 99 * KIB, "RTX 30, A5000, A4000"),
        Architecture(89, 99 * KIB, "RTX 40, L4, L40S"),
        Architecture(90, 227 * KIB, "H100, H200"),
        Architecture(100, 227 * KIB, "B200, GB200"),
        Architecture(120, 99 * KIB, "RTX 50, RTX PRO 6000"),
        Architecture(121, 99 * KIB, "GB10"),
    )
}
"""CUDA C++ programming guide, compute capabilities: maximum shared memory per thread block."""
LEAST_SHARED = min(one.shared for one in ARCHITECTURES.values())
"""Of an architecture that is not listed."""


def named(name: str) -> Architecture:
    """The architecture called e.g. "sm_86". Raises ConfigError."""
    known = {one.name: one for one in ARCHITECTURES.values()}
    if name not in known:
        allowed = ", ".join(f"{one.name} ({one.cards})" for one in known.values())
        raise choice_error(ConfigError, "arch", name, allowed, "Choose the card's.")
    return known[name]


def shared_of(number: int) -> int:
    """Bytes of shared memory that a program may have on an architecture, e.g. 86."""
    found = ARCHITECTURES.get(number)
    return LEAST_SHARED if found is None else found.shared


def stages_within(stages: int, stage: int, fixed: int, number: int) -> int:
    """Pipeline stages of a tile on an architecture: `stages`, or as many as fit, at least one.

    stage: bytes of shared memory that one stage loads; fixed: bytes beside them. One stage is in
    registers while the others wait, so stages - 1 of them are in shared memory.
    """
    return max(1, min(stages, 1 + (shared_of(number) - fixed) // stage))


PROCESSORS = 132
"""Multiprocessors of an H100 or H200, and of a GPU that is not there."""


def card_of(device: torch.device | str) -> Architecture:
    """Return the architecture of a GPU, listed here or not."""
    number = number_of(device)
    return ARCHITECTURES.get(number) or Architecture(number, shared_of(number), "this GPU")


_PLANNED: ContextVar[Architecture | None] = ContextVar("planned", default=None)
"""The card that planned_for names, in place of the device's own."""


@contextmanager
def planned_for(card: Architecture) -> Iterator[None]:
    """Let every GPU be this card, which need not be there, for plans and dry runs."""
    token = _PLANNED.set(card)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def is_planned() -> bool:
    """Return whether planned_for names the card of every GPU now."""
    return _PLANNED.get() is not None


def number_of(device: torch.device | str) -> int:
    """Return the architecture of a GPU, e.g. 86; HOPPER for a device that is none, where the
    interpreter runs what Hopper's tiles say."""
    place = torch.device(device)
    if place.type != "cuda":
        return HOPPER
    planned = _PLANNED.get()
    return _capability(place) if planned is None else planned.number


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def processors_of(device: torch.device) -> int:
    """Return the multiprocessors of a GPU."""
    if device.type != "cuda" or is_planned():
        return PROCESSORS
    return _processors(device)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
