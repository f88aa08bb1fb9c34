"""Record of a request that has ended, from which its log line, metrics and span are made."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.serve.http.request_context import RequestContext


@dataclass(frozen=True)
class RequestRecord:
    """A request of an endpoint that has ended, with all of its completions.

    id: id of the response.
    context: None where the request did not come by HTTP.
    cached_tokens: prompt tokens that were prefix cache hits.
    max_completion_tokens: tokens of the longest completion.
    metrics: of each completion, as of its last update.
    finish_reasons: of each completion; "abort" where its client did not wait for the end.
    error: message of the error that ended the request early.
    end_time: seconds of time.monotonic().
    """

    id: str
    context: RequestContext | None
    model: str
    params: SamplingParams
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    max_completion_tokens: int
    metrics: tuple[RequestMetrics, ...]
    finish_reasons: tuple[str, ...]
    error: str | None
    end_time: float

    @property
    def arrival_time(self) -> float:
        """Arrival of the request, in seconds of time.monotonic()."""
        return min(metrics.arrival_time for metrics in self.metrics)

    @cached_property
    def latencies(self) -> dict[str, float]:
        """Latencies in seconds, as far as they are known.

        queue: arrival to the first row in the batch.
        first_token: arrival to the first token of any completion.
        prefill: first row to the first token. decode: first to last token.
        inference: first row to the last token.
        e2e: arrival to the end of the response.
        """
        first_token = _earliest(metrics.first_token_time for metrics in self.metrics)
        scheduled = _earliest(metrics.scheduled_time for metrics in self.metrics)
        latencies = {"e2e": self.end_time - self.arrival_time}
        if scheduled is not None:
            latencies["queue"] = scheduled - self.arrival_time
        if first_token is not None:
            latencies["first_token"] = first_token - self.arrival_time
        if first_token is not None and scheduled is not None:
            last_token = max(metrics.finished_time or self.end_time for metrics in self.metrics)
            latencies["prefill"] = first_token - scheduled
            latencies["decode"] = last_token - first_token
            latencies["inference"] = last_token - scheduled
        return latencies


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
