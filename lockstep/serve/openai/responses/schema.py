"""What /v1/responses answers, as types: see answers.py."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lockstep.serve.openai.schema import Said

Status = Literal["in_progress", "completed", "incomplete"]


class ResponseText(Said):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(Said):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Said):
    """The model's text."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[ResponseText]


class ReasoningItem(Said):
    """What the model thought; there are no summaries."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(Said):
    """A function call; `arguments` is JSON text."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str = ""
    arguments: str


class CustomCallItem(Said):
    """A call of a custom tool, whose input is text."""

    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str = ""
    input: str


class ExecAction(Said):
    """Command of local_shell, as a list of words."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    working_directory: str = ""
    timeout_ms: int = 0


class LocalShellCallItem(Said):
    """Command for the client's local_shell."""

    type: Literal["local_shell_call"]
    id: str
    status: Status
    call_id: str
    action: ExecAction


class ShellAction(Said):
    """Commands of shell."""

    commands: list[str]
    timeout_ms: int | None
    max_output_length: int | None


class ShellCallItem(Said):
    """Commands for the client's shell."""

    type: Literal["shell_call"]
    id: str
    status: Status
    call_id: str
    action: ShellAction
    environment: dict[str, Any]


class PatchOperation(Said):
    """Change of one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""


class PatchCallItem(Said):
    """Change of a file, for the client's apply_patch."""

    type: Literal["apply_patch_call"]
    id: str
    status: Status
    call_id: str
    operation: PatchOperation


class ToolSearchCallItem(Said):
    """Search of the client for tools."""

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


class InputDetails(Said):
    """Of the prompt's tokens, those found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Said):
    """Of the answer's tokens, those of reasoning."""

    reasoning_tokens: int


class ResponseUsage(Said):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(Said):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Said):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ReasoningAsked(Said):
    """How much reasoning was asked for."""

    effort: str | None
    summary: str | None


class TextAsked(Said):
    """The form that was asked for."""

    format: dict[str, Any]


class ResponseObject(Said):
    """A response: output holds its items, in order. system_fingerprint stands for the numerics."""

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
    reasoning: ReasoningAsked
    store: bool
    temperature: float
    text: TextAsked
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


class InputText(Said):
    """Text that was sent."""

    type: Literal["input_text"]
    text: str


class SpokenText(Said):
    """Text that the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class SentMessage(Said):
    """A message of the input; an assistant's holds output_text."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | SpokenText]


class CallOutputItem(Said):
    """What a call gave."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str
    status: Status
    call_id: str
    output: str | list[InputText]


class ListedItem(BaseModel):
    """Item of another type, with the fields that were sent."""

    model_config = ConfigDict(extra="allow")

    type: str
    id: str
    status: str


class ItemList(Said):
    """A page of a response's input; the ids are null where it is empty."""

    object: Literal["list"]
    data: list[
        SentMessage | ReasoningItem | CallItem | CustomCallItem | CallOutputItem | ListedItem
    ]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Said):
    """The response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Numbered(Said):
    """An event; sequence_number counts a response's from 0."""

    sequence_number: int


class ResponseEvent(Numbered):
    """The response as a whole, at its beginning and at its end."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(Numbered):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InItem(Numbered):
    """An event inside of an item."""

    output_index: int
    item_id: str


class PartEvent(InItem):
    """A part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: ResponseText | ReasoningText


class TextDelta(InItem):
    """More text."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[Any]


class TextDone(InItem):
    """The text of a part, complete."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[Any]


class ReasoningDelta(InItem):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(InItem):
    """The reasoning of a part, complete."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(InItem):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    """A call's arguments, complete."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class InputDelta(InItem):
    """More of a custom tool's input."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class InputDone(InItem):
    """A custom tool's input, complete."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(Numbered):
    """What ended the stream early."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


EVENTS: tuple[type[Said], ...] = (
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
