"""Log lines of a server's throughput, as users of vLLM know them."""

import logging

from lockstep.engine.stats import Stats

THROUGHPUT_LOGGER = "lockstep.throughput"


class ThroughputLogger:
    """Logger of the figures between two readings of an engine's counters.

    An idle engine gets one line; further lines follow when it has work again.
    """

    def __init__(self, stats: Stats) -> None:
        self._previous = stats
        self._was_idle = True
        self._log = logging.getLogger(THROUGHPUT_LOGGER)

    def log(self, stats: Stats, seconds: float) -> None:
        """Write the line of the period since the last reading. seconds: length of the period."""
        is_idle = self._is_idle(stats)
        if not (is_idle and self._was_idle):
            self._log.info("%s", self._line(stats, seconds))
        self._was_idle = is_idle
        self._previous = stats

    def _is_idle(self, stats: Stats) -> bool:
        num_requests = stats.num_running + stats.num_waiting + stats.num_swapped
        names = ("prompt_tokens_total", "generation_tokens_total")
        return not num_requests and not any(self._increase(stats, name) for name in names)

    def _line(self, stats: Stats, seconds: float) -> str:
        prompt = self._increase(stats, "prompt_tokens_total") / seconds
        generated = self._increase(stats, "generation_tokens_total") / seconds
        parts = [
            f"Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generated:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting + stats.num_swapped} reqs",
            f"KV cache usage: {stats.pages_used / max(stats.pages, 1):.1%}",
        ]
        if queries := self._increase(stats, "prefix_queries_total"):
            hits = self._increase(stats, "prefix_hits_total")
            parts.append(f"Prefix cache hit rate: {hits / queries:.1%}")
        accepted = self._increase(stats, "accepted_tokens_total")
        if num_rows := self._increase(stats, "drafts_total"):
            parts.append(f"Mean acceptance length: {1 + accepted / num_rows:.2f}")
        if drafted := self._increase(stats, "draft_tokens_total"):
            parts.append(f"Avg draft acceptance rate: {accepted / drafted:.1%}")
        return ", ".join(parts)

    def _increase(self, stats: Stats, name: str) -> float:
        """Return the increase of a counter; a counter that fell was reset."""
        return max(0, getattr(stats, name) - getattr(self._previous, name))
