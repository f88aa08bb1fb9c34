"""Counters of an engine, as plain numbers for export."""

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

HISTOGRAMS = ("ttft_seconds", "itl_seconds", "e2e_seconds", "iteration_tokens", "decode_steps")
"""Fields of Stats that list observations."""


class DecodeStep(NamedTuple):
    """Decode step: device time in seconds, rows, drafts per row, and cached tokens of all rows."""

    seconds: float
    rows: int
    drafts: int
    context: int


@dataclass
class Stats:
    """Totals since the start, current gauges, and histogram lists that readers drain.

    num_running, num_waiting, num_swapped: requests with a row, without one, and preempted to host
    memory. pages, pages_used: of the cache on the device. prefix_queries_total,
    prefix_hits_total: prompt tokens that were looked up in the prefix cache, and found there.
    host_queries_total: those of them that no page on the device had. requests_success_total:
    ended requests by finish reason. ttft, itl, e2e: time to the first token, between tokens, and of
    a whole request.
    drafts_total: rows of steps with drafts (vLLM's name); draft_tokens_total: their drafts.
    accepted_at: accepted drafts by their index in a row. restarts_total: engines that were lost and
    restarted. resumed_total: requests that went on after the engine failed while it ran them.
    host_pages: size of the host tier of the cache. offloaded, fetched: pages and snapshots copied
    to the host tier and back. iteration_tokens: prompt and generated tokens of each step.
    host_hits_total: those prefix_hits_total tokens whose pages came back from the host tier.
    kv_event_batches_total, kv_event_batches_dropped_total: batches of KV events that were
    published, and dropped since the publisher's queue was full. audited_requests_total,
    audit_differences_total: ended requests that ran again, and those of them whose answers
    differed. audits_dropped_total: requests that were chosen for an audit and did not run again.
    num_audit_records: files about differences, those of earlier engines included.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    pages_used: int = 0
    pages: int = 0
    host_pages_used: int = 0
    host_pages: int = 0
    num_audits_pending: int = 0
    num_audit_records: int = 0
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
    resumed_total: int = 0
    kv_event_batches_total: int = 0
    kv_event_batches_dropped_total: int = 0
    audited_requests_total: int = 0
    audit_differences_total: int = 0
    audits_dropped_total: int = 0
    accepted_at: tuple[int, ...] = ()
    requests_success_total: Counter[str] = field(default_factory=Counter)
    ttft_seconds: list[float] = field(default_factory=list)
    itl_seconds: list[float] = field(default_factory=list)
    e2e_seconds: list[float] = field(default_factory=list)
    iteration_tokens: list[int] = field(default_factory=list)
    decode_steps: list[DecodeStep] = field(default_factory=list)

    MAX_VALUES = 10_000

    def observe(self, name: str, value: Any) -> None:
        """Append to a histogram list. Without a reader, the oldest values are dropped."""
        values = getattr(self, name)
        values.append(value)
        if len(values) > self.MAX_VALUES:
            del values[: self.MAX_VALUES // 2]  # in bulk, so that the cost per value is constant

    def drain(self) -> "Stats":
        """Return a copy that shares nothing; the histogram lists move into it."""
        drained = {name: getattr(self, name) for name in HISTOGRAMS}
        for name in HISTOGRAMS:
            setattr(self, name, [])
        counts = self.requests_success_total.copy()
        return replace(self, requests_success_total=counts, **drained)

    def after(self, earlier: "Stats") -> "Stats":
        """Add the totals and histogram lists of an earlier engine; gauges stay as they are."""
        totals = [f.name for f in fields(self) if f.name.endswith("_total")]
        added = {name: getattr(earlier, name) + getattr(self, name) for name in totals}
        lists = {name: getattr(earlier, name) + getattr(self, name) for name in HISTOGRAMS}
        for values in lists.values():
            del values[: -self.MAX_VALUES]
        pairs = zip_longest(earlier.accepted_at, self.accepted_at, fillvalue=0)
        return replace(self, accepted_at=tuple(a + b for a, b in pairs), **added, **lists)

    def ended(self) -> "Stats":
        """Return the counters of an engine that has ended: it has no gauges, and dropped the audits
        that waited.
        """
        dropped = self.audits_dropped_total + self.num_audits_pending
        gauges: dict[str, Any] = dict.fromkeys(GAUGES, 0)
        return replace(self, audits_dropped_total=dropped, **gauges)

    def only_histograms(self) -> "Stats":
        """Return the histogram lists without totals and gauges."""
        return Stats(**{name: getattr(self, name) for name in HISTOGRAMS})


GAUGES = tuple(
    entry.name
    for entry in fields(Stats)
    if not (entry.name.endswith("_total") or entry.name in (*HISTOGRAMS, "accepted_at"))
)
"""Fields of Stats that describe an engine at present."""
