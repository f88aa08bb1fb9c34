"""What the engine counts, as plain numbers that a server can export."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

HISTOGRAMS = ("ttft_seconds", "itl_seconds", "e2e_seconds", "iteration_tokens", "decode_steps")
"""Fields of Stats that list observations."""


class DecodeStep(NamedTuple):
    """A decode step: seconds as the device measured them; its rows, the drafts that each brought,
    and the tokens that all of them together had in the cache."""

    seconds: float
    rows: int
    drafts: int
    context: int


@dataclass
class Stats:
    """Totals since the start and gauges of now. Histogram lists are drained by whoever reads.

    drafts_total: rows of steps that brought drafts; accepted_at: how often those at each place were
    accepted. restarts_total: engines that were lost and started again. host_pages: of host memory
    behind the cache. offloaded, fetched: pages and snapshots that were copied there, and back.
    iteration_tokens: of each step, tokens of prompts and generated ones.
    host_hits_total: those of the prefix_hits_total tokens whose pages came back.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    pages_used: int = 0
    pages: int = 0
    host_pages_used: int = 0
    host_pages: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    steps_total: int = 0
    preemptions_total: int = 0
    prefix_hits_total: int = 0
    prefix_queries_total: int = 0
    host_hits_total: int = 0
    host_queries_total: int = 0
    offloaded_total: int = 0
    offloaded_bytes_total: int = 0
    fetched_total: int = 0
    fetched_bytes_total: int = 0
    drafts_total: int = 0
    restarts_total: int = 0
    accepted_at: tuple[int, ...] = ()
    requests_success_total: Counter[str] = field(default_factory=Counter)
    ttft_seconds: list[float] = field(default_factory=list)
    itl_seconds: list[float] = field(default_factory=list)
    e2e_seconds: list[float] = field(default_factory=list)
    iteration_tokens: list[int] = field(default_factory=list)
    decode_steps: list[DecodeStep] = field(default_factory=list)

    KEEP = 10_000

    def observe(self, name: str, value: Any) -> None:
        """Adds to a histogram; the oldest go when nobody reads."""
        values = getattr(self, name)
        values.append(value)
        if len(values) > self.KEEP:
            del values[: self.KEEP // 2]

    def drain(self) -> "Stats":
        """A copy that shares nothing with these; the histogram lists move into it."""
        drained = {name: getattr(self, name) for name in HISTOGRAMS}
        for name in HISTOGRAMS:
            setattr(self, name, [])
        counts = self.requests_success_total.copy()
        return replace(self, requests_success_total=counts, **drained)

    def after(self, earlier: "Stats") -> "Stats":
        """Totals and histogram lists on top of those of an engine that was there before; gauges as
        they are."""
        totals = [f.name for f in fields(self) if f.name.endswith("_total")]
        added = {name: getattr(earlier, name) + getattr(self, name) for name in totals}
        lists = {name: getattr(earlier, name) + getattr(self, name) for name in HISTOGRAMS}
        for values in lists.values():
            del values[: -self.KEEP]
        pairs = zip_longest(earlier.accepted_at, self.accepted_at, fillvalue=0)
        return replace(self, accepted_at=tuple(a + b for a, b in pairs), **added, **lists)

    def only_histograms(self) -> "Stats":
        """The histogram lists, without totals and gauges."""
        return Stats(**{name: getattr(self, name) for name in HISTOGRAMS})
