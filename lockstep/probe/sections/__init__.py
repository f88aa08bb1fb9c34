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


class Entry(NamedTuple):
    """Section of a probe. weight: share of the remaining seconds, relative to later sections."""

    title: str
    weight: int
    run: Callable[[Session, Section], None]


SECTIONS = {
    "protocol": Entry("Protocol", 1, protocol.run),
    "logprobs": Entry("Log-probabilities", 1, logprobs.run),
    "determinism": Entry("Determinism", 5, determinism.run),
    "stop": Entry("Stop strings", 1, stop_strings.run),
    "sampling": Entry("Seeded sampling", 1, sampling.run),
    "json": Entry("JSON", 2, json_output.run),
    "tools": Entry("Tool calls", 5, tool_calls.run),
    "repetition": Entry("Repetition", 2, repetition.run),
    "speed": Entry("Speed", 3, speed.run),
    "needle": Entry("Needle ladder", 4, needle.run),
    "drift": Entry("Drift", 1, drift.run),
}
"""Sections by the name that --sections has for them."""
