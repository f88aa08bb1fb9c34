"""Response objects of OpenAI's completions and of the server's other routes.

Writers build responses of these types, and /openapi.json describes them.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from lockstep.outputs import TokenSource


class PromptTokensDetails(TypedDict):
    """Prompt tokens that were prefix cache hits."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Tokens of reasoning, and draft tokens that were accepted and rejected. No draft changes the
    answer."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageObject(TypedDict):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(TypedDict):
    """A token: its text, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """A chosen token, and the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a completion, token by token."""

    content: list[ChosenTokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """Log-probability and rank of a prompt token."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobList = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class FunctionCall(TypedDict):
    """A called function; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallObject(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The model's message. reasoning_content is DeepSeek's name of reasoning, reasoning vLLM's."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallObject]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class TokenOriginObject(TypedDict):
    """Text that a token completed, and the token's source: an accepted draft, the bonus token after
    drafts, plain for a step that verified no draft, or forced for a token of forced_token_ids."""

    text: str
    source: TokenSource


class TokenFields(TypedDict):
    """Fields of a choice that return_token_ids and return_token_sources add."""

    token_ids: NotRequired[list[int]]
    token_sources: NotRequired[list[TokenOriginObject]]


class ParseErrors(TypedDict):
    """Reasons why text that looks like a tool call is content, or why a call is incomplete."""

    tool_call_parse_error: NotRequired[str]


class ForcedMismatchObject(TypedDict):
    """First token of forced_token_ids that the model would not have chosen.

    index: its index in forced_token_ids. chosen: the model's token there, -1 for none.
    """

    index: int
    forced: int
    chosen: int


class ChoiceEnd(TypedDict):
    """End of a completion: finish_reason is null until then. `error` is the message of a fault."""

    finish_reason: str | None
    stop_reason: int | str | None
    seed: int
    error: NotRequired[str]
    forced_mismatch: NotRequired[ForcedMismatchObject]


class ChatChoice(ChoiceEnd, TokenFields, ParseErrors):
    """A completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ResponseHead(TypedDict):
    """Fields of every response. system_fingerprint names the numerics."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptTokenIds(TypedDict):
    """Field that return_token_ids adds."""

    prompt_token_ids: NotRequired[list[int]]


class ChatCompletion(ResponseHead, PromptTokenIds):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: PromptLogprobList | None


class FunctionDelta(TypedDict):
    """Part of a call: first the name, then parts of the arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """Part of the call with this index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessageDelta(TypedDict):
    """Addition of a chunk to the message, with the names of AssistantMessage."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TokenFields, ParseErrors):
    """Addition of a chunk to a completion; the last one has the fields of ChoiceEnd."""

    index: int
    delta: ChatMessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    seed: NotRequired[int]
    error: NotRequired[str]
    forced_mismatch: NotRequired[ForcedMismatchObject]


class ChatChunk(ResponseHead, PromptTokenIds):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]


class TextLogprobs(TypedDict):
    """Log-probabilities as parallel lists; text_offset counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(ChoiceEnd, TokenFields, PromptTokenIds):
    """A completion, or the addition of a chunk to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: NotRequired[PromptLogprobList | None]


class Completion(ResponseHead):
    """Completions of the prompts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageObject


class CompletionChunk(ResponseHead):
    """An event of streamed completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[UsageObject | None]


class RenderedPrompt(TypedDict):
    """Token ids of a prompt, and the sampling parameters that would be used.

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


class ModelObject(TypedDict):
    """The served model under one of its names; root: the name that responses contain.

    default_sampling_params: parameters of requests that set none; max_tokens in it is also the
    maximum.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    default_sampling_params: dict[str, float]


class ModelList(TypedDict):
    """Names of the served model."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenizeResponse(TypedDict):
    """Token ids of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class DetokenizeResponse(TypedDict):
    """Text of token ids."""

    prompt: str


@with_config(ConfigDict(extra="allow"))
class TokenizerInfo(TypedDict):
    """tokenizer_config.json with all its settings, and the text of the chat template in use."""

    chat_template: NotRequired[str | None]
    bos_token: NotRequired[str | None]
    eos_token: NotRequired[str | None]
    pad_token: NotRequired[str | None]


class Load(TypedDict):
    """Number of requests that run or wait."""

    server_load: int


class Version(TypedDict):
    """Release of the server."""

    version: str


class DeletedAnswer(TypedDict):
    """Confirmation that an answer has ended and was erased."""

    id: str
    deleted: Literal[True]


RESPONSE_TYPES: tuple[type, ...] = (
    ChatCompletion,
    ChatChunk,
    Completion,
    CompletionChunk,
    DeletedAnswer,
    RenderedPrompt,
    ModelObject,
    ModelList,
    TokenizeResponse,
    DetokenizeResponse,
    TokenizerInfo,
    Load,
    Version,
)
"""Types that /openapi.json describes; the types of their fields follow."""
