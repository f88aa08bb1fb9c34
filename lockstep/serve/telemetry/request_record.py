"""What became of a request: what a line of the log and a span of a trace are made of."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.serve.http.request_context import Caller


@dataclass(frozen=True)
class Record:
    """A call of an endpoint that has ended, with all of its completions.

    id: the answer's. caller: None where no HTTP request was behind it. cached_tokens: of the
    prompt. longest: tokens of its longest completion. metrics: of each completion, as of its last
    update. finish_reasons: of each; "abort" where nobody waited for the end. error: why it ended
    early. ended: seconds of time.monotonic.
    """

    id: str
    caller: Caller | None
    model: str
    params: SamplingParams
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    longest: int
    metrics: tuple[RequestMetrics, ...]
    finish_reasons: tuple[str, ...]
    error: str | None
    ended: float

    @property
    def arrived(self) -> float:
        """Seconds of time.monotonic."""
        return min(one.arrival_time for one in self.metrics)

    @cached_property
    def latencies(self) -> dict[str, float]:
        """Seconds, those that are known.

        queue: from the arrival until a completion has a row. first_token: to the first of all
        tokens. prefill: from the row to it; decode: from it to the last; inference: both. e2e: from
        the arrival to the end of the answer.
        """
        first = _first(one.first_token_time for one in self.metrics)
        scheduled = _first(one.scheduled_time for one in self.metrics)
        found = {"e2e": self.ended - self.arrived}
        if scheduled is not None:
            found["queue"] = scheduled - self.arrived
        if first is not None:
            found["first_token"] = first - self.arrived
        if first is not None and scheduled is not None:
            last = max(one.finished_time or self.ended for one in self.metrics)
            found["prefill"] = first - scheduled
            found["decode"] = last - first
            found["inference"] = last - scheduled
        return found


def _first(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
