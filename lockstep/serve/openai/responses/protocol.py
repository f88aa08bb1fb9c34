"""What clients may send to /v1/responses, and how it becomes a ChatRequest."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from lockstep.errors import RequestError
from lockstep.serve.openai.protocol import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatRequest,
    Content,
    Effort,
    SamplerFields,
    chat_request,
    one_system,
)
from lockstep.serve.openai.responses.builtin_tools import ITEM_TOOLS, WebSearchTool
from lockstep.serve.openai.responses.call_items import (
    ITEM_NOTES,
    MAX_ID,
    CallId,
    CallItem,
    InputItem,
    shallow,
)
from lockstep.serve.openai.responses.client_tools import Tool, Toolbox
from lockstep.serve.requests.body_models import NOTES, Nested, Shape, known_fields
from lockstep.serve.requests.unsupported_fields import RESPONSES, refuse, without_effect

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
SAME = (*SamplerFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "user")
"""Fields that are called so in a ChatRequest too."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""A ChatRequest's field -> the one that it was made of."""


Echoed = BeforeValidator(shallow)
"""Of a field that answers tell again."""


class InputMessage(InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningPart(Nested):
    """A piece of reasoning, or of its summary."""

    WITHOUT_EFFECT = NOTES

    type: Literal["reasoning_text", "summary_text", "text"] = "reasoning_text"
    text: str


Thoughts = Annotated[list[ReasoningPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputReasoning(InputItem):
    """Reasoning of an earlier answer. Its summary is read where it has no content."""

    WITHOUT_EFFECT = ITEM_NOTES | {"encrypted_content"}

    type: Literal["reasoning"]
    content: Thoughts | None = None
    summary: Thoughts | None = None

    @property
    def text(self) -> str:
        """The reasoning, or its summary."""
        if self.content:
            return "".join(part.text for part in self.content)
        return "\n\n".join(part.text for part in self.summary or ())


class DroppedItem(InputItem):
    """Item without which the model knows as much as with it: see DROPPED."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["ghost_snapshot", "image_generation_call", "mcp_list_tools", "web_search_call"]


DROPPED = get_args(DroppedItem.model_fields["type"].annotation)
"""Types of items that are no part of the prompt. A search and a picture hold nothing that the model
could read, an MCP server's list names tools that this server cannot call, and a snapshot is a note
of Codex to itself."""


class ItemReference(InputItem):
    """Item of a response that is kept here. It is replaced by the item before it is rendered."""

    WITHOUT_EFFECT = ITEM_NOTES - {"id"}

    type: Literal["item_reference"]
    id: CallId


def _with_type(value: Any) -> Any:
    """Return an item with its type, which messages and references may leave out."""
    if not isinstance(value, dict) or value.get("type"):
        return value
    # OpenAI's schema makes the type of these two optional.
    alone = "id" in value and "role" not in value
    return {**value, "type": "item_reference" if alone else "message"}


AnyItem = InputMessage | InputReasoning | CallItem | DroppedItem | ItemReference
Item = Annotated[AnyItem, Field(discriminator="type"), BeforeValidator(_with_type)]
_ADAPTER: TypeAdapter[InputItem] = TypeAdapter(Item)


def call_item(fields: dict[str, Any]) -> InputItem | None:
    """Return a call of a tool as an item, from the fields that the answer shows.

    None where the model wrote more than an item may hold.
    """
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError:
        return None


Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def _listed(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ReasoningOptions(Nested):
    """How much to reason. Reasoning comes as it is, whatever summary is asked for."""

    WITHOUT_EFFECT = frozenset({"generate_summary"})
    ONLY_DEFAULTS = {"context": ("auto", "all_turns"), "mode": ("standard",)}

    effort: Effort | None = None
    summary: str | None = None


FORMAT_SHAPE: Shape = dict.fromkeys(("type", "name", "description", "schema", "strict"))
"""Fields of `text.format`."""
CHOICE_SHAPE: Shape = dict.fromkeys(("type", "name", "namespace", "mode", "tools"))
"""Fields of a tool_choice that is an object."""


class TextOptions(Nested):
    """The answer's form."""

    format: Annotated[dict[str, Any], known_fields(FORMAT_SHAPE, "structural_tag")] | None = None
    verbosity: str | None = None


class StreamOptions(Nested):
    """Options of a stream. Events are never padded."""

    WITHOUT_EFFECT = frozenset({"include_obfuscation"})


class ResponsesRequest(SamplerFields):
    """The body of /v1/responses."""

    OWN_NAMES = {"max_tokens": "max_output_tokens"}
    input: Annotated[Items, BeforeValidator(_listed, json_schema_input_type=str | Items)]
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
        """True where messages come with the log-probabilities of their tokens."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def ignored_fields(self) -> list[str]:
        """The names, in order, of sent fields that have no effect."""
        dropped = {f"input.{item.type}" for item in self.input if isinstance(item, DroppedItem)}
        unheard = {f"tools.{t.type}" for t in self.tools or () if isinstance(t, WebSearchTool)}
        extra = without_effect(self.model_extra or (), RESPONSES)
        return sorted([*extra, *dropped, *unheard])

    def offered_tools(self) -> list[Any]:
        """Return the tools that the model may call."""
        return [tool for tool in self.tools or () if not isinstance(tool, WebSearchTool)]

    def toolbox(self, items: Sequence[InputItem]) -> Toolbox:
        """Return the tools by the names of their functions, those that items add among them.

        Raises RequestError.
        """
        added = chain.from_iterable(item.added_tools() for item in items)
        return Toolbox(self.tools or (), added)

    def chat(self, items: Sequence[InputItem], toolbox: Toolbox) -> ChatRequest:
        """Return the turn that is asked for. items: the conversation. toolbox: its tools.

        Raises RequestError.
        """
        refuse(self.model_extra or {}, RESPONSES)
        _check_include(self.include or [])
        if self.background and not self.store:
            raise RequestError(
                "background=true needs store=true, since a response that is not kept cannot be "
                "asked for. Leave store out.",
                "background",
            )
        messages = list(messages_of(items))
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        messages = one_system(messages)
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
            **{name: getattr(self, name) for name in SAME},
            "stream": self.stream and not self.background,
        }
        return chat_request(fields, NAMES)


def messages_of(items: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield items as messages. Reasoning, text and calls in a row are one message."""
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
    """Whether the part goes on with the message: its reasoning and text come once, in order."""
    later = {"reasoning_content": ("content", "reasoning_content"), "content": ("content",)}
    return not any(
        name in part and (answer.get(other) is not None or _calls(answer))
        for name, others in later.items()
        for other in others
    )


def _parts(item: Any) -> Iterable[dict[str, Any]]:
    """Yield an item's messages; those of the assistant lack a role, since others may join them."""
    match item:
        case InputReasoning():
            yield {"reasoning_content": item.text}
        case InputMessage(role="assistant"):
            yield {"content": _plain(item.content)}
        case InputMessage():
            yield {"role": item.role, "content": _plain(item.content)}
    call = item.call()
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        yield {"tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    result = item.result()
    if result is not None:
        content = _plain(result.content)
        yield {"role": "tool", "tool_call_id": result.call_id, "content": content}


def _plain(content: Any) -> Any:
    """Parts of any of the types of text, as text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in plain_parts(content)]


def plain_parts(content: Sequence[Any]) -> list[str]:
    """The texts of a content's parts, of any of the types of text."""
    return [p if isinstance(p, str) else p.get("text", p.get("refusal")) for p in content]


def _chat_choice(choice: Any, toolbox: Toolbox) -> Any:
    """A function, or those that are allowed, as chat writes them: a level deeper."""
    if isinstance(choice, dict) and choice.get("type") in ITEM_TOOLS:
        choice = {"type": "function", "name": choice["type"]}
    match choice:
        case {"type": "function" | "custom", "name": str()}:
            return {"type": "function", "function": {"name": toolbox.chosen_name(choice)}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": [_chat_choice(tool, toolbox) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as `response_format`: a schema's name and itself stand one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {key: value for key, value in form.items() if key != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _check_include(include: list[str]) -> None:
    """Raises RequestError for parts of answers that do not exist here."""
    for name in include:
        if name not in (ENCRYPTED, LOGPROBS):
            raise RequestError(
                f"include has {name[:40]!r}, which is not supported; allowed: {LOGPROBS}, and "
                f"{ENCRYPTED}, instead of which reasoning comes as text. Leave it out.",
                "include",
            )
