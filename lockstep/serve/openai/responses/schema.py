"""Response objects and events of /v1/responses, which the writer builds."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from lockstep.serve.openai.schema import ChosenTokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenTokenLogprob]


class ReasoningText(TypedDict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(TypedDict):
    """The model's text."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(TypedDict):
    """Reasoning of the model; the summary is empty."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(TypedDict):
    """A function call; `arguments` is JSON text."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomCallItem(TypedDict):
    """A call of a custom tool, whose input is text."""

    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class OutputExecAction(TypedDict):
    """Command of local_shell as a list of words."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    working_directory: NotRequired[str]
    timeout_ms: NotRequired[int]


class LocalShellCallItem(TypedDict):
    """Command for the client's local_shell."""

    type: Literal["local_shell_call"]
    id: str
    status: Status
    call_id: str
    action: OutputExecAction


class OutputShellAction(TypedDict):
    """Commands of shell."""

    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellCallItem(TypedDict):
    """Commands for the client's shell."""

    type: Literal["shell_call"]
    id: str
    status: Status
    call_id: str
    action: OutputShellAction
    environment: dict[str, Any]


class OutputPatchOperation(TypedDict):
    """Change of one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: NotRequired[str]


class PatchCallItem(TypedDict):
    """Change of a file, for the client's apply_patch."""

    type: Literal["apply_patch_call"]
    id: str
    status: Status
    call_id: str
    operation: OutputPatchOperation


class ToolSearchCallItem(TypedDict):
    """Search for tools, for the client."""

    type: Literal["tool_search_call"]
    id: str
    status: Status
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any]


OutputItem = (
    MessageItem
    | ReasoningItem
    | CallItem
    | CustomCallItem
    | LocalShellCallItem
    | ShellCallItem
    | PatchCallItem
    | ToolSearchCallItem
)


class InputTokensDetails(TypedDict):
    """Prompt tokens that were prefix cache hits."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """Output tokens inside of reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(TypedDict):
    """Reason why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Reason why a response ended early."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(TypedDict):
    """The request's options of reasoning."""

    effort: str | None
    summary: str | None


class TextSettings(TypedDict):
    """The request's form of the text."""

    format: dict[str, Any]


class ResponseObject(TypedDict):
    """A response: output has its items in order. system_fingerprint names the numerics."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    system_fingerprint: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    background: bool
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    seed: int | None
    tool_call_parse_error: str | None


class InputTextPart(TypedDict):
    """Text that the client sent."""

    type: Literal["input_text"]
    text: str


class OutputTextPart(TypedDict):
    """Text of the model in the input."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class InputMessageItem(TypedDict):
    """A message of the input; an assistant's has output_text."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputTextPart | OutputTextPart]


class CallOutputItem(TypedDict):
    """Result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str
    status: Status
    call_id: str
    output: str | list[InputTextPart]


@with_config(ConfigDict(extra="allow"))
class OtherItem(TypedDict):
    """Item of another type, with the fields that the client sent."""

    type: str
    id: str
    status: str


class ItemList(TypedDict):
    """A page of a response's input. The ids are null where it is empty."""

    object: Literal["list"]
    data: list[
        InputMessageItem | ReasoningItem | CallItem | CustomCallItem | CallOutputItem | OtherItem
    ]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    """Confirmation that a response is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class NumberedEvent(TypedDict):
    """An event. sequence_number counts the events of a response from 0."""

    sequence_number: int


class ResponseEvent(NumberedEvent):
    """The whole response, at its beginning and at its end."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(NumberedEvent):
    """Beginning or end of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemPosition(TypedDict):
    """Position of an event inside of the output."""

    output_index: int
    item_id: str


class PartPosition(ItemPosition):
    """Position of an event inside of an item's content."""

    content_index: int


class PartEvent(NumberedEvent, PartPosition):
    """Beginning or end of a part of an item's content."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class TextDelta(NumberedEvent, PartPosition):
    """Addition to a text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChosenTokenLogprob]


class TextDone(NumberedEvent, PartPosition):
    """A complete text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChosenTokenLogprob]


class ReasoningDelta(NumberedEvent, PartPosition):
    """Addition to reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(NumberedEvent, PartPosition):
    """Complete reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(NumberedEvent, ItemPosition):
    """Addition to the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(NumberedEvent, ItemPosition):
    """Complete arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDelta(NumberedEvent, ItemPosition):
    """Addition to the input of a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDone(NumberedEvent, ItemPosition):
    """Complete input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(NumberedEvent):
    """Error that ended the stream early."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


EVENTS: tuple[type, ...] = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    ArgumentsDelta,
    ArgumentsDone,
    InputDelta,
    InputDone,
    ErrorEvent,
)
"""Events of a stream."""
RESPONSE_TYPES: tuple[type, ...] = (ResponseObject, ItemList, DeletedResponse, *EVENTS)
