"""Accounting of a scenario: metrics of requests and totals of the engine, computed from outside.

No answer depends on them, but clients are billed and operators decide by them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.engine.engine import Engine
from lockstep.outputs import RequestMetrics
from lockstep.scheduling.request import Request


@dataclass(frozen=True)
class Observed:
    """Course of a request as its driver saw it.

    cached: cached tokens of its first admission. preempted: how often it lost its row. has_failed:
    a step raised while it ran.
    """

    request: Request
    cached: int
    preempted: int
    has_failed: bool


def wrong_metrics(observed: Observed, max_drafts: int) -> str | None:
    """Return what is wrong with the metrics and token sources of a request, or None.

    max_drafts: drafts per step.
    """
    request = observed.request
    metrics = request.metrics
    sources = Counter(request.token_sources)
    count = len(request.output_token_ids)
    if sources.total() != count:
        return f"{sources.total()} token sources of {count} tokens"
    if metrics.num_preemptions != observed.preempted:
        return f"num_preemptions {metrics.num_preemptions} instead of {observed.preempted}"
    if metrics.num_accepted_tokens > metrics.num_draft_tokens:
        return "more drafts were accepted than there were"
    if metrics.num_draft_tokens and not request.speculate:
        return "drafts were verified of a request that wants none"
    if observed.has_failed:
        return _wrong_times(request)  # its tokens so far were forced, and it was admitted again
    if metrics.num_cached_tokens != observed.cached:
        return f"num_cached_tokens {metrics.num_cached_tokens} instead of {observed.cached}"
    num_forced = min(len(request.forced_token_ids), count)
    if sources["forced"] != num_forced:
        return f"{sources['forced']} forced tokens instead of {num_forced}"
    # A step may have accepted tokens after the one that ended the answer.
    max_cut = max_drafts if request.finish_reason in ("stop", "length") else 0
    cuts = [metrics.num_accepted_tokens - sources["draft"]]
    if count and not num_forced:
        # The prompt's step gives the first token, and each other step one more than its drafts.
        cuts.append(1 + metrics.num_steps + metrics.num_accepted_tokens - count)
    if not all(0 <= cut <= max_cut for cut in cuts):
        return (
            f"{count} tokens, {sources['draft']} of them drafts, from {metrics.num_steps} steps "
            f"that accepted {metrics.num_accepted_tokens}"
        )
    return _wrong_times(request)


def _wrong_times(request: Request) -> str | None:
    """Return what is wrong with the times of a request, or None."""
    metrics = request.metrics
    times = (
        metrics.arrival_time,
        metrics.scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    if request.finish_reason in ("stop", "length") and None in times:
        return f"it ended with the times {times}"
    known = [time for time in times if time is not None]
    return None if known == sorted(known) else f"its times are not in order: {times}"


class Ledger:
    """Totals of an engine since a moment at which it had no request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._before = self._totals()

    def _totals(self) -> Counter[str]:
        """Return the totals of the engine's statistics."""
        stats = self.engine.refresh_stats()
        totals = Counter(
            {
                "prompt_tokens_total": stats.prompt_tokens_total,
                "generation_tokens_total": stats.generation_tokens_total,
                "draft_tokens_total": stats.draft_tokens_total,
                "accepted_tokens_total": stats.accepted_tokens_total,
            }
        )
        for reason, count in stats.requests_success_total.items():
            totals[f"requests_success_total of {reason}"] = count
        return totals

    def wrong_totals(self, requests: Sequence[Request], has_failed: bool) -> str | None:
        """Return which total is not that of these requests, or None.

        requests: all requests since then. has_failed: a step raised.
        """
        expected = Counter(
            {
                "prompt_tokens_total": sum(len(r.prompt_token_ids) for r in requests),
                # A request that began again and was aborted had these tokens before.
                "generation_tokens_total": sum(
                    max(len(r.output_token_ids), r.num_resumed) for r in requests
                ),
            }
        )
        names = ["prompt_tokens_total", "generation_tokens_total"]
        if not has_failed:
            metrics: list[RequestMetrics] = [r.metrics for r in requests]
            expected["draft_tokens_total"] = sum(m.num_draft_tokens for m in metrics)
            expected["accepted_tokens_total"] = sum(m.num_accepted_tokens for m in metrics)
            names += ["draft_tokens_total", "accepted_tokens_total"]
        for request in requests:
            name = f"requests_success_total of {request.finish_reason}"
            expected[name] += 1
            names.append(name)
        actual = self._totals()
        for name in names:
            if actual[name] - self._before[name] != expected[name]:
                return (
                    f"{name} rose by {actual[name] - self._before[name]} instead of "
                    f"{expected[name]}"
                )
        return None
