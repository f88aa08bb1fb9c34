"""Log lines of a server's throughput, as users of vLLM know them."""

import logging

from lockstep.engine.stats import Stats

THROUGHPUT = "lockstep.throughput"
"""The logger of these lines."""


class Throughput:
    """Figures between two readings of an engine's counters.

    An idle engine gets one line, then nothing is written until there is work again.
    """

    def __init__(self, stats: Stats) -> None:
        self._before = stats
        self._was_idle = True
        self._log = logging.getLogger(THROUGHPUT)

    def log(self, stats: Stats, seconds: float) -> None:
        """Write the line of the time since the last reading."""
        is_idle = self._is_idle(stats)
        if not (is_idle and self._was_idle):
            self._log.info("%s", self._line(stats, seconds))
        self._was_idle = is_idle
        self._before = stats

    def _is_idle(self, stats: Stats) -> bool:
        waiting = stats.num_running + stats.num_waiting + stats.num_swapped
        names = ("prompt_tokens_total", "generation_tokens_total")
        return not waiting and not any(self._grown(stats, name) for name in names)

    def _line(self, stats: Stats, seconds: float) -> str:
        prompt = self._grown(stats, "prompt_tokens_total") / seconds
        generated = self._grown(stats, "generation_tokens_total") / seconds
        parts = [
            f"Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generated:.1f} tokens/s",
            f"Running: {stats.num_running} reqs",
            f"Waiting: {stats.num_waiting + stats.num_swapped} reqs",
            f"KV cache usage: {stats.pages_used / max(stats.pages, 1):.1%}",
        ]
        if looked_up := self._grown(stats, "prefix_queries_total"):
            hits = self._grown(stats, "prefix_hits_total")
            parts.append(f"Prefix cache hit rate: {hits / looked_up:.1%}")
        accepted = self._grown(stats, "accepted_tokens_total")
        if rows := self._grown(stats, "drafts_total"):
            parts.append(f"Mean acceptance length: {1 + accepted / rows:.2f}")
        if drafted := self._grown(stats, "draft_tokens_total"):
            parts.append(f"Avg draft acceptance rate: {accepted / drafted:.1%}")
        return ", ".join(parts)

    def _grown(self, stats: Stats, name: str) -> float:
        """Return by how much a counter has grown; a counter that fell began anew."""
        return max(0, getattr(stats, name) - getattr(self._before, name))
