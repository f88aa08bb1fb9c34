"""Sections of a check, in the order of their runs, and the section of each engine."""

from lockstep.check.matrix.setups import (
    COLD,
    KERNEL,
    LOGITS,
    PHASES,
    PREEMPTED,
    PREFIX_HIT,
    SAMPLING,
    SCENARIO,
    TRANSFORMERS,
    Setup,
)
from lockstep.choices import read_choices

KERNELS = "kernels"
TOKENS = "tokens"
CACHE = "cache"
CAPTURE = "capture"
SECTIONS = {
    KERNELS: "every kernel that the model needs, in a child process",
    LOGITS: "raw logits: bits in other batches and chunks, numbers against transformers",
    SAMPLING: "sampled tokens against their exact distributions",
    TOKENS: "random scenarios, and drafters with an empty cache",
    CACHE: "prefix hits and preemption",
    CAPTURE: "captured CUDA graphs",
}
"""Name of each section, and what it examines."""
SECTION_OF_PHASE = {
    KERNEL: KERNELS,
    LOGITS: LOGITS,
    TRANSFORMERS: LOGITS,
    SAMPLING: SAMPLING,
    SCENARIO: TOKENS,
    COLD: TOKENS,
    PREFIX_HIT: CACHE,
    PREEMPTED: CACHE,
}
"""Section of the engines of each phase that run eagerly."""


def section_of(setup: Setup) -> str:
    """Return the section of an engine. Engines of the matrix with graphs belong to CAPTURE."""
    if setup.phase in PHASES and setup.graph != "none":
        return CAPTURE
    return SECTION_OF_PHASE[setup.phase]


def section_names(value: str) -> tuple[str, ...]:
    """Return the names of --sections in their order; empty means all. Raises ConfigError."""
    return read_choices("sections", value, SECTIONS)
