"""Request body of /v1/responses, and its conversion to a ChatRequest."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lockstep.errors import RequestError
from lockstep.serve.openai.conversation import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Content,
    Effort,
    merge_system_messages,
)
from lockstep.serve.openai.protocol import ChatRequest, chat_request
from lockstep.serve.openai.responses.builtin_tools import BUILTIN_TOOL_NAMES, WebSearchTool
from lockstep.serve.openai.responses.call_items import (
    ITEM_ANNOTATIONS,
    MAX_ID,
    CallId,
    CallItem,
    InputItem,
    shallow,
)
from lockstep.serve.openai.responses.client_tools import Tool, Toolbox
from lockstep.serve.openai.sampling_fields import SamplerFields
from lockstep.serve.requests.body_models import ANNOTATION_FIELDS, Nested, Shape, known_fields
from lockstep.serve.requests.unsupported_fields import RESPONSES, refuse_unsupported, without_effect

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SAME_FIELDS = (*SamplerFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "user")
"""Fields that have the same name in a ChatRequest."""
SENT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""Field of a ChatRequest -> the field of the body that it was made from."""


Echoed = BeforeValidator(shallow)
"""Validator of a field that the response repeats."""


class InputMessage(InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningPart(Nested):
    """A part of reasoning, or of its summary."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["reasoning_text", "summary_text", "text"] = "reasoning_text"
    text: str


ReasoningParts = Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputReasoning(InputItem):
    """Reasoning of an earlier response. Its summary is read where it has no content."""

    WITHOUT_EFFECT = ITEM_ANNOTATIONS | {"encrypted_content"}

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary."""
        if self.content:
            return "".join(part.text for part in self.content)
        return "\n\n".join(part.text for part in self.summary or ())


class DroppedItem(InputItem):
    """Item that the prompt omits: see DROPPED_TYPES."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ghost_snapshot", "image_generation_call", "mcp_list_tools", "web_search_call"]


DROPPED_TYPES = get_args(DroppedItem.model_fields["type"].annotation)
"""Types of items that the prompt omits. A search and a picture contain nothing that the model can
read. An MCP server's list names tools that this server cannot call. Codex writes snapshots for
itself.
"""


class ItemReference(InputItem):
    """Reference to an item of a stored response, which replaces it in the conversation."""

    WITHOUT_EFFECT = ITEM_ANNOTATIONS - {"id"}

    type: Literal["item_reference"]
    id: CallId


def _with_type(value: Any) -> Any:
    """Return an item with its type, which messages and references may omit."""
    if not isinstance(value, dict) or value.get("type"):
        return value
    # OpenAI's schema makes the type of these two optional.
    is_reference = "id" in value and "role" not in value
    return {**value, "type": "item_reference" if is_reference else "message"}


AnyItem = InputMessage | InputReasoning | CallItem | DroppedItem | ItemReference
Item = Annotated[AnyItem, Field(discriminator="type"), BeforeValidator(_with_type)]
_ADAPTER: TypeAdapter[InputItem] = TypeAdapter(Item)


def call_item(fields: dict[str, Any]) -> InputItem | None:
    """Return a call of a tool as an input item, from the fields of its output item.

    None where the model wrote more than the limits of input items allow.
    """
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError:
        return None


def read_item(fields: dict[str, Any]) -> InputItem:
    """Return an input item from its fields. Raises ValueError."""
    return _ADAPTER.validate_python(fields)


Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def _as_list(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ReasoningOptions(Nested):
    """Options of reasoning. The response has the full reasoning, whatever summary is requested."""

    WITHOUT_EFFECT = frozenset({"generate_summary"})
    ONLY_DEFAULTS = {"context": ("auto", "all_turns"), "mode": ("standard",)}

    effort: Effort | None = None
    summary: str | None = None


FORMAT_SHAPE: Shape = dict.fromkeys(("type", "name", "description", "schema", "strict"))
"""Fields of `text.format`."""
CHOICE_SHAPE: Shape = dict.fromkeys(("type", "name", "namespace", "mode", "tools"))
"""Fields of a tool_choice that is an object."""


class TextOptions(Nested):
    """Form of the answer."""

    format: Annotated[dict[str, Any], known_fields(FORMAT_SHAPE, "structural_tag")] | None = None
    verbosity: str | None = None


class StreamOptions(Nested):
    """Options of a stream. Events are never padded."""

    WITHOUT_EFFECT = frozenset({"include_obfuscation"})


class ResponsesRequest(SamplerFields):
    """The body of /v1/responses."""

    OWN_NAMES = {"max_tokens": "max_output_tokens"}
    input: Annotated[Items, BeforeValidator(_as_list, json_schema_input_type=str | Items)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=MAX_ID)
    store: bool = True
    max_output_tokens: int | None = None
    tools: Annotated[list[Tool] | None, Echoed] = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, Echoed, known_fields(CHOICE_SHAPE)] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: Annotated[TextOptions | None, Echoed] = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    include: list[str] | None = Field(None, fail_fast=True, max_length=MAX_PARTS)
    top_logprobs: int | None = None
    background: bool = False
    stream_options: StreamOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        """True where messages have the log-probabilities of their tokens."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def ignored_fields(self) -> list[str]:
        """Return the sorted names of sent fields that have no effect."""
        dropped = {f"input.{item.type}" for item in self.input if isinstance(item, DroppedItem)}
        unused = {f"tools.{t.type}" for t in self.tools or () if isinstance(t, WebSearchTool)}
        extra = without_effect(self.model_extra or (), RESPONSES)
        return sorted([*extra, *dropped, *unused])

    def offered_tools(self) -> list[Any]:
        """Return the tools that the model may call."""
        return [tool for tool in self.tools or () if not isinstance(tool, WebSearchTool)]

    def toolbox(self, items: Sequence[InputItem]) -> Toolbox:
        """Return the tools by the names of their functions, with those that items add.

        Raises RequestError.
        """
        added = chain.from_iterable(item.added_tools() for item in items)
        return Toolbox(self.tools or (), added)

    def chat(self, items: Sequence[InputItem], toolbox: Toolbox) -> ChatRequest:
        """Convert the body to a ChatRequest. items: the conversation. toolbox: its tools.

        Raises RequestError.
        """
        refuse_unsupported(self.model_extra or {}, RESPONSES)
        _check_include(self.include or [])
        if self.background and not self.store:
            raise RequestError(
                "background=true needs store=true, since a response that is not stored cannot be "
                "retrieved. Leave store out.",
                "background",
            )
        messages = list(messages_of(items))
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        messages = merge_system_messages(messages)
        fields = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": toolbox.functions(),
            "tool_choice": _chat_choice(self.tool_choice, toolbox),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": _chat_format(self.text.format) if self.text else None,
            "verbosity": self.text.verbosity if self.text else None,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            **{name: getattr(self, name) for name in SAME_FIELDS},
            "stream": self.stream and not self.background,
        }
        return chat_request(fields, SENT_NAMES)


def messages_of(items: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Convert items to messages. Consecutive reasoning, text and calls become one message."""
    answer: dict[str, Any] | None = None
    for item in items:
        for part in _parts(item):
            if part.get("role", "assistant") != "assistant":
                if answer is not None:
                    yield answer
                answer = None
                yield part
            elif answer is None or not _fits(answer, part):
                if answer is not None:
                    yield answer
                answer = {"role": "assistant", **part}
            else:
                answer |= {**part, "tool_calls": _calls(answer) + _calls(part)}
    if answer is not None:
        yield answer


def _calls(message: dict[str, Any]) -> list[Any]:
    return message.get("tool_calls") or []


def _fits(answer: dict[str, Any], part: dict[str, Any]) -> bool:
    """Return whether a part can join a message, whose reasoning and text come once and in order."""
    later = {"reasoning_content": ("content", "reasoning_content"), "content": ("content",)}
    return not any(
        name in part and (answer.get(later_field) is not None or _calls(answer))
        for name, later_fields in later.items()
        for later_field in later_fields
    )


def _parts(item: Any) -> Iterable[dict[str, Any]]:
    """Yield an item's messages. Those of the assistant have no role, since they may be joined."""
    match item:
        case InputReasoning():
            yield {"reasoning_content": item.text}
        case InputMessage(role="assistant"):
            yield {"content": _text_content(item.content)}
        case InputMessage():
            yield {"role": item.role, "content": _text_content(item.content)}
    call = item.call()
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    result = item.result()
    if result is not None:
        content = _text_content(result.content)
        yield {"role": "tool", "tool_call_id": result.call_id, "content": content}


def _text_content(content: Any) -> Any:
    """Return content whose parts have the type `text`, whatever type of text they had."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in part_texts(content)]


def part_texts(content: Sequence[Any]) -> list[str]:
    """Return the text of each part, whatever type of text it has."""
    return [
        part if isinstance(part, str) else part.get("text", part.get("refusal")) for part in content
    ]


def _chat_choice(choice: Any, toolbox: Toolbox) -> Any:
    """Convert tool_choice to the form of chat, which nests names one level deeper."""
    if isinstance(choice, dict) and choice.get("type") in BUILTIN_TOOL_NAMES:
        choice = {"type": "function", "name": choice["type"]}
    match choice:
        case {"type": "function" | "custom", "name": str()}:
            return {"type": "function", "function": {"name": toolbox.chosen_name(choice)}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [_chat_choice(tool, toolbox) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert `text.format` to `response_format`, which nests a schema one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _check_include(include: list[str]) -> None:
    """Raise RequestError for parts of responses that this server does not have."""
    for name in include:
        if name not in (ENCRYPTED, LOGPROBS):
            raise RequestError(
                f"include has {name[:40]!r}, which is not supported; allowed: {LOGPROBS}, and "
                f"{ENCRYPTED}, instead of which reasoning comes as text. Leave it out.",
                "include",
            )
