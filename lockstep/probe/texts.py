"""Analysis of texts: loops, collapsing vocabulary, and the first difference of two answers."""

import re
from collections.abc import Sequence

from lockstep.probe.answers import Answer

MIN_REPEATS = 4
"""Minimum consecutive copies of a unit that make a loop."""
MIN_LOOP = 60
"""Minimum characters of a loop: shorter ones occur in tables and lists."""
MAX_UNIT = 400
"""Maximum characters of a repeated unit."""
WINDOW = 40
"""Words of a window whose distinct words are counted."""
COLLAPSED = 0.25
"""Share of distinct words below which a window has collapsed."""
HEALTHY = 0.5
"""Share of distinct words above which a window is healthy."""


def loop_at_end(text: str) -> str | None:
    """Return the unit that the end of a text repeats MIN_REPEATS times or more, or None."""
    tail = text.rstrip()
    for size in range(1, min(MAX_UNIT, len(tail) // MIN_REPEATS) + 1):
        unit = tail[-size:]
        # A unit of one character must fill MIN_LOOP characters: a short row of dots is no loop.
        repeats = max(MIN_REPEATS, -(-MIN_LOOP // size))
        if tail.endswith(unit * repeats) and unit.strip():
            return unit
    return None


def collapse(text: str) -> int | None:
    """Return the word at which the vocabulary collapses after a healthy part, or None.

    A cascade of almost equal words need not have an exact period, so no loop is found in it.
    """
    words = re.findall(r"\w+", text.lower())
    was_healthy = False
    for start in range(0, len(words) - WINDOW + 1, WINDOW // 4):
        share = len(set(words[start : start + WINDOW])) / WINDOW
        was_healthy |= share > HEALTHY
        if was_healthy and share < COLLAPSED:
            return start
    return None


def first_difference(a: str, b: str) -> int | None:
    """Return the index of the first different character, or None if the texts are equal."""
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def gap_at(answer: Answer, index: int) -> float | None:
    """Return the logit gap in nats of an answer's token that has the character at this index."""
    end = 0
    for position in answer.positions:
        end += len(position.token)
        if end > index:
            return position.gap
    return None


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: sample standard deviation over mean."""
    if len(values) < 2 or not mean(values):
        return 0.0
    center = mean(values)
    variance = sum((value - center) ** 2 for value in values) / (len(values) - 1)
    return float(variance**0.5 / center)
