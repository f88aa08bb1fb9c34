"""Sections of a probe: one module each, with TITLE and run(session, section).

A section is added here by one line of SECTIONS. Sections run in this order.
"""

from collections.abc import Callable
from typing import NamedTuple

from lockstep.probe.report import Section
from lockstep.probe.sections import (
    determinism,
    drift,
    json_output,
    logprobs,
    needle,
    protocol,
    repetition,
    sampling,
    speed,
    stop_strings,
    tool_calls,
)
from lockstep.probe.session import Session


class SectionEntry(NamedTuple):
    """Section of a probe. weight: share of the remaining seconds, relative to later sections."""

    title: str
    weight: int
    run: Callable[[Session, Section], None]


SECTIONS = {
    "protocol": SectionEntry("Protocol", 1, protocol.run),
    "logprobs": SectionEntry("Log-probabilities", 1, logprobs.run),
    "determinism": SectionEntry("Determinism", 5, determinism.run),
    "stop": SectionEntry("Stop strings", 1, stop_strings.run),
    "sampling": SectionEntry("Seeded sampling", 1, sampling.run),
    "json": SectionEntry("JSON", 2, json_output.run),
    "tools": SectionEntry("Tool calls", 5, tool_calls.run),
    "repetition": SectionEntry("Repetition", 2, repetition.run),
    "speed": SectionEntry("Speed", 3, speed.run),
    "needle": SectionEntry("Needle ladder", 4, needle.run),
    "drift": SectionEntry("Drift", 1, drift.run),
}
"""Sections by the name that --sections has for them."""
