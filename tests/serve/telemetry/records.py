"""Records of finished requests."""

from typing import Any

from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.serve.telemetry.request_record import RequestRecord


def finished_record(**changes: Any) -> RequestRecord:
    """Return the record of a request with two completions, the second without any token."""
    metrics = (
        RequestMetrics(arrival_time=10.0, scheduled_time=10.5, first_token_time=11.0),
        RequestMetrics(arrival_time=10.0),
    )
    received: dict[str, Any] = dict(
        id="cmpl-1",
        context=None,
        model="m",
        params=SamplingParams(n=2, max_tokens=9),
        prompt_tokens=7,
        completion_tokens=4,
        cached_tokens=2,
        draft_tokens=6,
        accepted_tokens=3,
        max_completion_tokens=4,
        metrics=metrics,
        finish_reasons=("length", "abort"),
        error=None,
        end_time=12.25,
    )
    return RequestRecord(**received | changes)
