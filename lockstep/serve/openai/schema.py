"""What the server answers, as types: /openapi.json is made of them, and tests hold answers to them.

Answers are written as plain JSON objects; these classes say what stands in them.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel
from pydantic.json_schema import models_json_schema

from lockstep.outputs import TokenSource


class Said(BaseModel):
    """A part of an answer. Nothing but its fields ever stands in it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Said):
    """What is wrong, which field is at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Said):
    """OpenAI's error object; in a stream, the last event but [DONE]."""

    error: ErrorDetail


class PromptDetails(Said):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int


class AnswerDetails(Said):
    """Tokens of reasoning, and drafts that were accepted and that were not; no draft changes the
    answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(Said):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


class Named(Said):
    """A token, its text, its bytes and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class Ranked(Named):
    """A chosen token, and the likeliest ones at its place."""

    top_logprobs: list[Named]


class ChatLogprobs(Said):
    """Log-probabilities of an answer, token by token."""

    content: list[Ranked]
    refusal: None


class PromptLogprob(Said):
    """A prompt token's log-probability and rank."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobList = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class WholeFunction(Said):
    """A called function; `arguments` is JSON text."""

    name: str
    arguments: str


class WholeCall(Said):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: WholeFunction


class AssistantMessage(Said):
    """The model's message. reasoning is reasoning_content, by vLLM's name."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[WholeCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class TokenOrigin(Said):
    """The text that a token settled, and how the token came: as a draft that was accepted, as the
    target's own behind drafts (bonus), or from a step that verified no draft (plain)."""

    text: str
    source: TokenSource


class Ended(Said):
    """How a completion ended: null while it has not. `error` says why finish_reason is error;
    token_ids come with return_token_ids, token_sources with return_token_sources.
    tool_call_parse_error: why text that looked like a tool call is none, or why a call broke off;
    all of its text is content."""

    index: int
    token_ids: list[int] | None = None
    token_sources: list[TokenOrigin] | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    seed: int | None = None
    error: str | None = None
    tool_call_parse_error: str | None = None


class ChatChoice(Ended):
    """One of the n completions."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class Head(Said):
    """What every answer begins with. system_fingerprint stands for the numerics."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    """A chat answer as a whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobList | None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Said):
    """A piece of a call: its name first, then its arguments in pieces."""

    name: str | None = None
    arguments: str


class CallDelta(Said):
    """A piece of the call with this index."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Said):
    """What a chunk adds to the message. reasoning is reasoning_content, by vLLM's name."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatDelta(Ended):
    """What a chunk adds to a completion."""

    delta: Delta
    logprobs: ChatLogprobs | None


class ChatChunk(Head):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: UsageObject | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(Said):
    """Log-probabilities as parallel lists; text_offset counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Ended):
    """One completion, or what a chunk adds to it."""

    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Head):
    """Completions as a whole."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageObject


class CompletionChunk(Head):
    """One event of streamed completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageObject | None = None


class Invocation(RootModel[ChatCompletion | Completion]):
    """A chat answer, or completions, as the body asks for."""


class RenderedPrompt(Said):
    """A prompt's token ids, and the sampling parameters that would be generated with.

    features and kv_transfer_params are null: they belong to images and to other servers' caches.
    """

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, bool] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class RenderedPrompts(RootModel[list[RenderedPrompt]]):
    """Each prompt's token ids, and the sampling parameters that would be generated with."""


class Model(Said):
    """The model that is served, under one of its names; root: the name that answers bear.

    default_sampling_params: what a request gets that does not say; max_tokens: the most it gets.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    default_sampling_params: dict[str, float]


class ModelList(Said):
    """The names of the one model that is served."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(Said):
    """Token ids of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(Said):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(Said):
    """tokenizer_config.json with all its settings, and the text of the chat template in use."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


class Load(Said):
    """Requests that run or wait now."""

    server_load: int


class Version(Said):
    """The release that serves."""

    version: str


ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, response or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server failed; its log says more.",
    503: "The engine has stopped, hangs, or the server is shutting down.",
    504: "The request's time was up.",
}


def schemas(kinds: Sequence[type[Said]]) -> dict[str, Any]:
    """The JSON schemas of what is said, and of its parts, by name."""
    _, found = models_json_schema(
        [(model, "serialization") for model in kinds],
        ref_template="#/components/schemas/{model}",
    )
    return found["$defs"]


def _event(kinds: Sequence[type[Said]], named: bool) -> dict[str, Any]:
    """A server-sent event: JSON text of one of these kinds.

    named: its name is its type; otherwise the last event's data is [DONE].
    """
    said = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [schema_path(kind) for kind in kinds]},
    }
    if named:
        properties = {"event": {"type": "string"}, "data": said}
        return {"type": "object", "properties": properties, "required": ["event", "data"]}
    about = f"{' or '.join(kind.__name__ for kind in kinds)}, as JSON; the last event is [DONE]"
    data = {"anyOf": [said, {"const": "[DONE]"}], "description": about}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def schema_path(kind: type[BaseModel]) -> dict[str, str]:
    """Return the reference to a kind's JSON schema in /openapi.json."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def openapi_responses(
    whole: type[BaseModel], *events: type[Said], named: bool = False, error: type[Said] = Error
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: the answer, its events where it streams, and every error."""
    good: dict[str, Any] = {"model": whole, "description": str(whole.__doc__)}
    if events:
        good["content"] = {"text/event-stream": {"itemSchema": _event(events, named)}}
    told = {"application/json": {"schema": schema_path(error)}}
    errors: dict[int | str, dict[str, Any]] = {
        code: {"description": text, "content": told} for code, text in ERRORS.items()
    }
    return {200: good, **errors}


def plain(about: str, *codes: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers in plain text."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    found: dict[int | str, dict[str, Any]] = {200: {"description": about, "content": text}}
    found |= {code: {"description": ERRORS[code], "content": text} for code in codes}
    return found
