"""Counters of the events that a check exercised, from the metrics of its answers."""

from collections import Counter
from collections.abc import Iterable

from lockstep.answer import Answer

CACHED = "cached tokens"
PREEMPTIONS = "preemptions"
DRAFTED = "draft tokens"
ACCEPTED = "accepted draft tokens"
FORCED = "forced tokens"
JOINT_STEPS = "joint steps"
"""Names of counters in a report."""


def count_events(answers: Iterable[Answer]) -> Counter[str]:
    """Sum the metrics of requests to counters of the events that the check exercised."""
    events: Counter[str] = Counter()
    for metrics in (answer.metrics for answer in answers):
        events[CACHED] += metrics.num_cached_tokens
        events[PREEMPTIONS] += metrics.num_preemptions
        events[DRAFTED] += metrics.num_draft_tokens
        events[ACCEPTED] += metrics.num_accepted_tokens
    return events
