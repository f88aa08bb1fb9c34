"""What clients may send to /v1/responses, and how it becomes a ChatRequest."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from lockstep.errors import RequestError
from lockstep.serve.client_tools import Tool, Toolbox, function_name
from lockstep.serve.objects import NOTES, Nested, Shape, known_fields
from lockstep.serve.protocol import (
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_TOOLS,
    ChatRequest,
    Content,
    Effort,
    SamplerFields,
    chat_request,
    one_system,
)
from lockstep.serve.refused import RESPONSES, refuse, without_effect
from lockstep.text.json_schema import MOST_DEPTH, is_deep

MAX_ID = 128
"""Characters of a response's or a call's id."""
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


def _shallow(value: Any) -> Any:
    """What answers tell again, as it was sent. Raises ValueError where no answer could hold it."""
    if is_deep(value):
        raise ValueError(f"more than {MOST_DEPTH} levels of nesting; allowed: at most {MOST_DEPTH}")
    return value


Echoed = BeforeValidator(_shallow)
"""Of a field that answers tell again."""


CALL_NOTES = NOTES | {"caller", "created_by", "parsed_arguments"}
"""Fields of a call without effect."""
OUTPUT_NOTES = CALL_NOTES | {"name", "namespace"}
"""Fields of a call's output without effect: its call_id says which tool was called."""


class InputMessage(Nested):
    """A message."""

    WITHOUT_EFFECT = NOTES

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class InputCall(Nested):
    """A call that the model made."""

    WITHOUT_EFFECT = CALL_NOTES

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    namespace: str | None = Field(None, max_length=MAX_NAME)
    arguments: str


class InputCustomCall(Nested):
    """A call of a custom tool that the model made."""

    WITHOUT_EFFECT = CALL_NOTES

    type: Literal["custom_tool_call"]
    call_id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    namespace: str | None = Field(None, max_length=MAX_NAME)
    input: str


class InputCustomCallOutput(Nested):
    """Result of a call of a custom tool."""

    WITHOUT_EFFECT = OUTPUT_NOTES

    type: Literal["custom_tool_call_output"]
    call_id: str = Field(max_length=MAX_ID)
    output: Content


class InputCallOutput(Nested):
    """What a call gave."""

    WITHOUT_EFFECT = OUTPUT_NOTES

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_ID)
    output: Content


class ReasoningPart(Nested):
    """A piece of reasoning."""

    WITHOUT_EFFECT = NOTES

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class InputReasoning(Nested):
    """Reasoning of an earlier answer."""

    WITHOUT_EFFECT = NOTES | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = Field(None, fail_fast=True, max_length=MAX_PARTS)


def _kind(value: Any) -> Any:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return found or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCustomCallOutput, Tag("custom_tool_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]
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
        return without_effect(self.model_extra or (), RESPONSES)

    def toolbox(self) -> Toolbox:
        """Return the tools by the names of their functions. Raises RequestError."""
        return Toolbox(self.tools or ())

    def chat(self, items: Sequence[Any]) -> ChatRequest:
        """The turn that is asked for; items: the conversation. Raises RequestError."""
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
        toolbox = self.toolbox()
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
    """Items as messages: reasoning, text and calls that follow each other are one of them."""
    answer: dict[str, Any] | None = None
    for item in items:
        part = _assistants(item)
        if part is None:
            if answer is not None:
                yield answer
            answer = None
            yield _message(item)
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


def _assistants(item: Any) -> dict[str, Any] | None:
    """An item's part of an assistant's message; None for what others say."""
    match item:
        case InputReasoning():
            return {"reasoning_content": "".join(part.text for part in item.content or ())}
        case InputCall():
            return _called(item, item.arguments)
        case InputCustomCall():
            return _called(item, json.dumps({"input": item.input}, ensure_ascii=False))
        case InputMessage(role="assistant"):
            return {"content": _plain(item.content)}
    return None


def _called(item: InputCall | InputCustomCall, arguments: str) -> dict[str, Any]:
    function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
    return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}


def _message(item: Any) -> dict[str, Any]:
    if isinstance(item, (InputCallOutput, InputCustomCallOutput)):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _plain(item.output)}
    return {"role": item.role, "content": _plain(item.content)}


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
