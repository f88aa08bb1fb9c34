"""Chat templates: a checkpoint's own Jinja template, rendered as `transformers` renders it."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.errors import RequestError

Message = dict[str, Any]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class ChatTemplate:
    """A compiled template; `special_tokens` (bos_token, eos_token, ...) are its variables."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = special_tokens or {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. Raises RequestError where the template refuses the messages."""
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_normal(message, i) for i, message in enumerate(messages)],
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(**variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}. Change messages, tools or "
                "chat_template_kwargs.",
                "messages",
            ) from error


def _normal(message: Message, index: int) -> Message:
    """A message as templates expect it: plain text, arguments as objects, one reasoning field."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{index}] needs a role: system, user, assistant or tool.", "messages"
        )
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = _text(message.get("content"), index)
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        normal["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_call(call, index) for call in calls]
    return normal


def _text(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, str) or (isinstance(part, dict) and "text" in part)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"messages[{index}].content has a part of type {kind!r}; allowed: text. "
                "Send text parts only.",
                "messages",
            )
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)


def _call(call: Message, index: int) -> Message:
    function = dict(call.get("function") or call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"messages[{index}].tool_calls has arguments that are no JSON object: "
            f"{function.get('arguments')!r}. Send back the arguments as they were received.",
            "messages",
        )
    function["arguments"] = arguments
    return {**call, "function": function}
