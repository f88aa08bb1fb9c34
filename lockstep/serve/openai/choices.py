"""Parts that responses of chat and of text completions have in common."""

from lockstep.serve.openai.sampling_fields import SamplingFields
from lockstep.serve.openai.schema import (
    ChoiceEnd,
    ResponseHead,
    TokenFields,
    UsageObject,
)
from lockstep.serve.requests.accumulators import TokenBuffer
from lockstep.serve.requests.active_request import ActiveRequest, Usage


def response_head(active: ActiveRequest) -> ResponseHead:
    """Return the fields that every response of a request has."""
    return {
        "id": active.parsed.id,
        "created": active.created,
        "model": active.model_name,
        "system_fingerprint": active.service.fingerprint,
    }


def usage_object(usage: Usage, counts_drafts: bool = True) -> UsageObject:
    """Return OpenAI's usage object.

    counts_drafts: False where the client's prediction was not the source of the drafts.
    """
    accepted, drafted = (usage.accepted, usage.drafted) if counts_drafts else (0, 0)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def choice_end(
    active: ActiveRequest,
    index: int,
    finish_reason: str | None,
    stop_reason: int | str | None,
    error: str | None,
) -> ChoiceEnd:
    """Return the fields of a choice that describe its end."""
    end: ChoiceEnd = {
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "seed": active.requests[index].seed,
    }
    if error:
        end["error"] = error
    mismatch = active.forced_mismatch(index)
    if finish_reason is not None and mismatch is not None:
        end["forced_mismatch"] = {
            "index": mismatch.index,
            "forced": mismatch.forced,
            "chosen": mismatch.chosen,
        }
    return end


def wants_tokens(active: ActiveRequest, body: SamplingFields) -> bool:
    """Return whether the response describes tokens, not only their text."""
    return active.parsed.has_logprobs or body.return_token_ids or body.return_token_sources


def token_fields(body: SamplingFields, tokens: TokenBuffer) -> TokenFields:
    """Return the requested fields of a choice that describe its tokens."""
    fields: TokenFields = {}
    if body.return_token_ids:
        fields["token_ids"] = tokens.token_ids
    if body.return_token_sources:
        fields["token_sources"] = [
            {"text": text, "source": source} for text, source in tokens.origins
        ]
    return fields
