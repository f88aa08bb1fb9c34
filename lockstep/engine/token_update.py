"""New tokens of a request since its last update."""

from typing import NamedTuple

from lockstep.outputs import Logprob, RequestMetrics, TokenSource
from lockstep.scheduling.request import Request


class TokenUpdate(NamedTuple):
    """New tokens of a request, and its state after them. It shares no data with the engine.

    finish_reason: set on the last update. error: message for the client where finish_reason is
    "error". prompt_logprobs: set with the first tokens only. token_sources: one per new token.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    token_sources: tuple[TokenSource, ...] = ()


def token_update(request: Request, num_seen: int) -> TokenUpdate:
    """Return the update of a request. num_seen: answer tokens that earlier updates had."""
    has_scores = request.params.logprobs is not None
    has_prompt = num_seen == 0 and request.params.prompt_logprobs is not None
    return TokenUpdate(
        request.output_token_ids[num_seen:],
        request.logprobs[num_seen:] if has_scores else None,
        request.finish_reason,
        request.stop_reason,
        request.metrics.copy(),
        [None, *request.prompt_logprobs] if has_prompt else None,
        request.error,
        tuple(request.token_sources[num_seen:]),
    )
