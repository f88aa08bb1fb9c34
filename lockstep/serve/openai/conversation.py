"""Fields of a conversation: messages, tools, and variables of the chat template."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, WithJsonSchema
from pydantic_core import PydanticCustomError

from lockstep.errors import RequestError, brief
from lockstep.serve.http.errors import UNKNOWN_FIELD
from lockstep.serve.requests.body_models import (
    ANNOTATION_FIELDS,
    Body,
    TemplateObject,
    check_extra_fields,
)
from lockstep.text.processor import Processor
from lockstep.text.templates.chat_template import TemplateRefusalError

MAX_MESSAGES = 8192
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_CALLS = 256
MAX_NAME = 256
SYSTEM_ROLES = ("system", "developer")
RESERVED_VARIABLES = ("messages", "tools", "self", "continue_final_message")
"""Variables of the chat template that chat_template_kwargs may not set."""
TEXT_SCHEMA = {"type": "string"}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's levels of reasoning effort."""


PART_FIELDS = frozenset({"type", "text", "refusal", *ANNOTATION_FIELDS})
"""Fields of a part of a message's content."""


def _check_content(value: Any) -> Any:
    """Return text, or a list of text parts. Raises ValueError naming the part at fault."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise ValueError(f"allowed: a text, or a list of at most {MAX_PARTS} text parts")
    for i, part in enumerate(value):
        if isinstance(part, str):
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(
                f"part {i} is of type {str(kind)[:40]!r}; allowed: text, which is all that this "
                "server reads. Send text in its place"
                + (" (Codex: tools.view_image = false)" if kind == "input_image" else "")
            )
        if not isinstance(part.get("text", part.get("refusal")), str):
            raise ValueError(f'part {i} has no text; send {{"type": "text", "text": ...}}')
        unknown = next((name for name in part if name not in PART_FIELDS), None)
        if unknown is not None and part[unknown] is not None:
            # "inside" continues the path of the error within the list.
            raise PydanticCustomError(UNKNOWN_FIELD, "unknown field", {"inside": (i, unknown)})
    return value


def tool_type_check(allowed: str) -> BeforeValidator:
    """Return the validator of a tool's type.

    Clients run all tools, and the model calls them with JSON of a schema.
    """

    def check(value: Any) -> Any:
        if value == "custom" != allowed:
            raise ValueError(
                "custom tools work with /v1/responses only; allowed: function. Send it as a "
                "function of one text, or use /v1/responses"
            )
        if value != allowed:
            raise ValueError(
                "tools are run by clients, and called with JSON of a schema; allowed: "
                f"{allowed}. Leave this tool out, or declare it by a schema"
            )
        return value

    return BeforeValidator(check)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT_SCHEMA, "refusal": TEXT_SCHEMA},
    "required": ["type", "text"],
}
Content = Annotated[
    Any,
    AfterValidator(_check_content),
    WithJsonSchema(
        {"anyOf": [TEXT_SCHEMA, {"type": "array", "items": _PART, "maxItems": MAX_PARTS}]}
    ),
]


class CalledFunction(TemplateObject):
    """The function of a tool call: `arguments` is JSON text, as the model wrote it."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {"parsed_arguments"}
    name: str = Field(min_length=1, max_length=MAX_NAME)
    arguments: Annotated[Any, WithJsonSchema({"anyOf": [TEXT_SCHEMA, {"type": "object"}]})] = "{}"


class SentCall(TemplateObject):
    """A tool call in an assistant's message."""

    WITHOUT_EFFECT = (ANNOTATION_FIELDS - {"id"}) | {"extra_content"}
    ONLY_DEFAULTS = {"custom": ({},)}
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See TemplateObject."""
        yield from super().extra_fields(path)
        yield from self.function.extra_fields(f"{path}.function")


class Message(TemplateObject):
    """A message of a conversation."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {
        "finish_reason",
        "injected",
        "message_id",
        "metadata",
        "opts",
        "parsed",
        "reasoning_details",
        "reasoning_signature",
        "stop_reason",
        "thinking_blocks",
        "token_ids",
        "tool_call_parse_error",
    }
    ONLY_DEFAULTS = {
        "audio": ({},),
        "function_call": ({},),
        "prefix": (False,),
        "partial": (False,),
    }

    role: str = Field(min_length=1, max_length=MAX_NAME)
    content: Content = None
    name: str | None = None
    tool_calls: list[SentCall] | None = Field(None, fail_fast=True, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See TemplateObject."""
        yield from super().extra_fields(path)
        for i, call in enumerate(self.tool_calls or ()):
            yield from call.extra_fields(f"{path}.tool_calls[{i}]")


TOOL_ANNOTATIONS = frozenset({"cache_control", "eager_input_streaming", "provider_specific_fields"})
"""Fields of a tool that change no answer."""
TOOL_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
    "input_examples": ([],),
}
"""Unsupported fields of a tool -> values that describe the behavior of this server."""


class Function(TemplateObject):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None
    WITHOUT_EFFECT = TOOL_ANNOTATIONS
    ONLY_DEFAULTS = TOOL_DEFAULTS


class Tool(TemplateObject):
    """A tool that the model may call."""

    WITHOUT_EFFECT = TOOL_ANNOTATIONS
    ONLY_DEFAULTS = TOOL_DEFAULTS
    type: Annotated[Literal["function"], tool_type_check("function")] = "function"
    function: Function

    def extra_fields(self, path: str) -> Iterator[tuple[str, str]]:
        """See TemplateObject."""
        yield from super().extra_fields(path)
        yield from self.function.extra_fields(f"{path}.function")


class Conversation(Body):
    """A conversation, and the variables of the chat template besides messages and tools."""

    messages: list[Message] | None = Field(None, fail_fast=True, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: Effort | None = None

    def template_kwargs(self, processor: Processor) -> dict[str, Any]:
        """Return the template's variables; chat_template_kwargs override all others.

        Raises RequestError where a variable is reserved, where fields exclude each other, and for
        an unknown field of a message or a tool that the template does not read.
        """
        check_extra_fields(self.messages, "messages", processor.template_reads)
        check_extra_fields(self.tools, "tools", processor.template_prints)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message=true needs add_generation_prompt=false; set it.",
                "continue_final_message",
            )
        for name in RESERVED_VARIABLES:
            if name in self.chat_template_kwargs:
                raise RequestError(
                    f"chat_template_kwargs has {name!r}, which has a field of its own; allowed: "
                    "the template's other variables. Send it as a field.",
                    "chat_template_kwargs",
                )
        effort = self.reasoning_effort
        return {
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt": self.add_generation_prompt,
            **(processor.effort_kwargs(effort) if effort else {}),
            **self.chat_template_kwargs,
        }


def check_call_ids(messages: Sequence[Message]) -> None:
    """Raise RequestError for a tool result whose id no tool call of the conversation has.

    OpenAI's and Anthropic's servers refuse such a result too. OpenAI's /v1/responses pairs them
    wherever they are, so this check accepts any order. Other servers write calls without ids, or
    with empty ones. Ids are compared only where all calls have one.
    """
    known = {call.id or None for message in messages for call in message.tool_calls or ()}
    if None in known:
        return
    for message in messages:
        call_id = message.tool_call_id
        if message.role == "tool" and call_id and call_id not in known:
            raise RequestError(
                f"messages: a tool result has the id {brief(call_id)}, which no tool call has; "
                "allowed: the ids of tool calls in the conversation. Send the call too.",
                "messages",
            )


def merge_system_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the leading messages of the system and of developers into one system message.

    Other APIs have a separate field for the system prompt, and templates accept one message.
    """
    leading = list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages))
    if len(leading) < 2:
        return messages
    contents = [message["content"] for message in leading]
    parts = [
        part
        for content in contents
        for part in (content if isinstance(content, list) else [content])
    ]
    return [{"role": "system", "content": parts}, *messages[len(leading) :]]


def late_system_as_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert system messages after other messages to messages of the user.

    Agents add system messages in the middle of a conversation. Many templates accept one at the
    beginning only. Moving them there would change the beginning of the prompt, so that no prefix of
    the conversation would be cached. Claude Code uses the same tags for models without such
    messages.
    """
    num_leading = len(list(takewhile(lambda message: message["role"] in SYSTEM_ROLES, messages)))
    later = [
        {"role": "user", "content": f"<system-reminder>\n{_text_of(message)}\n</system-reminder>"}
        if message["role"] in SYSTEM_ROLES
        else message
        for message in messages[num_leading:]
    ]
    return [*messages[:num_leading], *later]


def _text_of(message: dict[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@contextmanager
def naming_late_system_message(roles: Sequence[str]) -> Iterator[None]:
    """Add the first late system message to the error of a chat template that refuses the messages.

    Many templates accept a system message at the beginning only, and their error does not say
    which message is at fault. roles: role of each message.
    """
    try:
        yield
    except TemplateRefusalError as error:
        num_leading = len(list(takewhile(SYSTEM_ROLES.__contains__, roles)))
        late = (i for i, role in enumerate(roles) if i > num_leading and role in SYSTEM_ROLES)
        index = next(late, None)
        if index is not None:
            error.args = (
                f"messages[{index}].role={roles[index]!r}: {error} The template may allow a system "
                "message at the beginning only. Move it there, or send it as a user message.",
            )
        raise
