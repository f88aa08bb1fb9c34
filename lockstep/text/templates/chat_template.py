"""Chat templates: a checkpoint's Jinja template, rendered as transformers renders it."""

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from lockstep.errors import CheckpointError, RequestError, brief, context_length_error
from lockstep.text.grammars.json_schema import is_deep
from lockstep.text.parsers.literals import finite
from lockstep.text.templates import probe
from lockstep.text.templates.environment import template_environment
from lockstep.text.templates.files import DEFAULT, TOOL_USE
from lockstep.text.tokenizers.control_tokens import ControlTokens

Message = dict[str, Any]

MAX_DEPTH = 72
"""Maximum nesting of a message, a tool or a template variable. Arguments of a call have at most 64
levels, and begin at level 5 of a message."""
MAX_BITS = 1024
"""Maximum bits of a whole number: those of floats."""
MAX_TEMPLATE = 1 << 17
"""Maximum characters of a template: they take up to 2 s to compile."""
MAX_EXPANSION = 4
"""Maximum rendered characters, marks included, as a multiple of the characters sent."""
_ROLE = re.compile(r"[\w. -]{1,64}")
_TRUSTED = ("system", "assistant")  # roles that may write added tokens, but no special ones
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts -> the field of their text."""
_RESERVED = ("self", "messages", "tools", "continue_final_message")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message's reasoning, in transformers' order of precedence."""
_REMEDY = "Change messages, tools or chat_template_kwargs."


def check_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return a client's chat_template_kwargs. Raises RequestError for reserved names."""
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(
            f"chat_template_kwargs={brief(kwargs)} is not allowed; allowed: an object. Send the "
            "template's variables by name.",
            "chat_template_kwargs",
        )
    for name in _RESERVED:
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs sets {name}, which the request's own fields set. Remove it.",
                "chat_template_kwargs",
            )
    if not isinstance(kwargs.get("add_generation_prompt", True), bool):
        raise RequestError(
            f"add_generation_prompt={brief(kwargs['add_generation_prompt'])} is not allowed; "
            "allowed: True or False. Send one of them.",
            "chat_template_kwargs",
        )
    return kwargs


class TemplateRefusalError(RequestError):
    """Error that the chat template raised about the messages."""


class ChatTemplate:
    """Compiled chat template.

    source: its text. special_tokens: variables such as bos_token, by name.
    control: control tokens that strings must not spell.
    limit: maximum characters of messages, tools and variables together; more cannot fit into
    max_model_len tokens.
    origin: the file, for error messages.
    Raises: CheckpointError.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        control: ControlTokens | None = None,
        limit: float = math.inf,
        origin: object = "chat_template",
        max_model_len: int = 0,
    ) -> None:
        if len(source) > MAX_TEMPLATE:
            raise CheckpointError(
                f"{origin}: the chat template has {len(source)} characters; allowed: at most "
                f"{MAX_TEMPLATE}. Name another with chat_template."
            )
        self.source = source
        self._special_tokens = special_tokens or {}
        self._control = control
        self._limit = limit
        self._max_model_len = max_model_len
        environment = template_environment(control)
        try:
            parsed = environment.parse(source)
            undeclared = jinja2.meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(parsed)
        except Exception as error:  # Jinja and Python's compiler raise many kinds
            raise CheckpointError(
                f"{origin}: the chat template does not compile: {_message_of(error)}. Repair it, "
                "or download it again."
            ) from None
        self.variables = frozenset(undeclared)
        self.names = _names_in(parsed)
        """Names of fields that the template may read: attributes, and constant keys."""
        self.prints_objects = any(
            node.name == "tojson" for node in parsed.find_all(jinja2.nodes.Filter)
        )
        self.findings = probe.probe(self._plain)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """Return the text of the prompt.

        Raises RequestError if the template refuses the messages.
        """
        return self._unmark(self.render_marked(messages, tools, **kwargs))

    def render_marked(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render like `render`, with a mark in each spelling of a control token in a string.

        continue_final_message: cut the text at the end of the last message's content.
        """
        copy = _MarkedCopy(self._control, self._limit, self._max_model_len)
        shown = copy.messages(messages)
        end = _mark_end(shown) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            "add_generation_prompt": True,
            "documents": None,
            **copy.value(check_kwargs(kwargs), "chat_template_kwargs"),
            "tools": copy.tools(tools),
        }
        try:
            text = self._with_arguments(messages, self.findings.contents(shown), variables)
        except Exception as error:  # a template may raise any exception
            why = self._unmark(_message_of(error)).rstrip(".")
            raise TemplateRefusalError(
                f"the chat template refuses these messages: {why}. {_REMEDY}",
                "messages",
            ) from error
        return _before(text, end) if end else text

    def _with_arguments(
        self, sent: list[Message], shown: list[Message], variables: dict[str, Any]
    ) -> str:
        """Return the text with tool-call arguments in the form that the template reads.

        Arguments are passed as objects first, as most templates read them. They are passed as text
        if the template refuses objects (for example because it concatenates them), or if it writes
        an object as Python's repr, which is not JSON.
        """
        objects = [call for message in shown for call in message.get("tool_calls", ())]
        if not objects:
            return self._generate(messages=shown, **variables)
        texts = self._argument_texts(sent, shown)
        try:
            text = self._generate(messages=shown, **variables)
        except Exception:
            try:
                return self._generate(messages=texts, **variables)
            except Exception:  # the form of the arguments is not the reason for the refusal
                return self._generate(messages=shown, **variables)
        reprs = {repr(call["function"]["arguments"]) for call in objects} - {"{}"}
        if not any(text_repr in text for text_repr in reprs):
            return text
        try:
            with_texts = self._generate(messages=texts, **variables)
        except Exception:
            return text
        quoted_reprs = {repr(call["function"]["arguments"]) for m in texts for call in _calls_of(m)}
        # A template that prints the whole call as Python's repr would quote the text.
        return (
            text
            if any(text_repr in with_texts for text_repr in reprs | quoted_reprs)
            else with_texts
        )

    def _argument_texts(self, sent: list[Message], shown: list[Message]) -> list[Message]:
        """Return the messages with their calls' arguments as the client's text, marked."""
        copies = []
        for original, message in zip(sent, shown, strict=True):
            calls = _calls_of(message)
            texts = [text for text in map(_argument_text, _calls_of(original)) if text is not None]
            if len(texts) != len(calls):
                texts = [_json(call["function"]["arguments"]) for call in calls]
            elif self._control:
                texts = [self._control.mark(text, special_only=True) for text in texts]
            renewed = [
                {**call, "function": {**call["function"], "arguments": text}}
                for call, text in zip(calls, texts, strict=True)
            ]
            copies.append({**message, "tool_calls": renewed} if renewed else message)
        return copies

    def _plain(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        """Render messages without marks, for probes. Raises any exception of the template."""
        variables = {**self._special_tokens, "add_generation_prompt": True, "documents": None}
        return self._with_arguments(messages, messages, {**variables, "tools": tools})

    def _generate(self, **variables: Any) -> str:
        return self._join_bounded(self._template.generate(**variables))

    def _join_bounded(self, parts: Iterable[str]) -> str:
        """Return the rendered text. Raise TemplateError if it exceeds the limit."""
        rendered: list[str] = []
        remaining = MAX_EXPANSION * self._limit
        for part in parts:
            rendered.append(part)
            remaining -= len(part)
            if remaining < 0:
                raise jinja2.TemplateError(
                    f"it writes more than {MAX_EXPANSION * self._limit} characters"
                )
        return "".join(rendered)

    def _unmark(self, text: str) -> str:
        return self._control.unmark(text) if self._control else text


def _names_in(parsed: jinja2.nodes.Template) -> frozenset[str]:
    """Return the attributes that a template reads, and its string constants."""
    attributes = {node.attr for node in parsed.find_all(jinja2.nodes.Getattr)}
    constants = [node.value for node in parsed.find_all(jinja2.nodes.Const)]
    return frozenset(attributes | {value for value in constants if isinstance(value, str)})


class ChatTemplates:
    """Templates of a model: one for all requests, or a second one for requests with tools.

    sources: templates by name (see files.py).
    options: arguments of ChatTemplate.
    """

    def __init__(self, sources: Mapping[str, str], *options: Any) -> None:
        used = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
        self._by_name = {name: ChatTemplate(text, *options) for name, text in used.items()}
        self.source = "\n".join(used.values())
        """Text of all templates, by which parsers are chosen."""
        self.variables = frozenset().union(*(t.variables for t in self._by_name.values()))
        self.names = frozenset().union(*(t.names for t in self._by_name.values()))
        self.prints_objects = any(t.prints_objects for t in self._by_name.values())

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def choose(self, tools: Any) -> ChatTemplate:
        """Return the template of a request. Raises RequestError if none fits."""
        with_tools = self._by_name.get(TOOL_USE) if tools else None
        chosen = with_tools or self._by_name.get(DEFAULT)
        if chosen is None:
            raise RequestError(
                f"the model has a chat template for requests with tools ({TOOL_USE}) and none for "
                "others. Send tools, or set chat_template (--chat-template).",
                "messages",
            )
        return chosen

    def warnings(self) -> list[str]:
        """Return a warning for each part of a conversation that a template drops."""
        return [
            f"the chat template {name!r} drops {part}: the model does not see them"
            for name, template in self._by_name.items()
            for part in template.findings.lost
            # If there is a template for tools, the default one need not render them.
            if name == TOOL_USE or TOOL_USE not in self._by_name or part != probe.TOOLS
        ]


class _MarkedCopy:
    """Copier of JSON from a client, with marks in control tokens. Raises RequestError for other
    values.

    limit: maximum characters of everything that is copied.
    """

    def __init__(self, control: ControlTokens | None, limit: float, max_model_len: int) -> None:
        self._control = control
        self._limit = limit
        self._max_model_len = max_model_len
        self._remaining = limit

    def messages(self, messages: Any) -> list[Message]:
        """Return the messages in the form that templates expect."""
        if not isinstance(messages, list | tuple):
            raise _refusal("messages", messages, "a list of messages")
        copies = []
        for i, message in enumerate(messages):
            normal = _normalize(message, f"messages[{i}]")
            role = normal["role"]
            copy = self.value(normal, f"messages[{i}]", role in _TRUSTED)
            copies.append({**copy, "role": role})
        return copies

    def tools(self, tools: Any) -> list[dict[str, Any]] | None:
        """Return the tools; None if there are none."""
        if tools is None:
            return None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise _refusal("tools", tools, "a list of objects")
        return self.value(tools, "tools") or None

    def value(self, value: Any, path: str, special_only: bool = True) -> Any:
        """Return a copy of a JSON value. Raises RequestError, which names the path of a fault."""
        return self._copy(value, (path,), special_only)

    def _copy(self, value: Any, path: tuple[Any, ...], special_only: bool) -> Any:
        self._spend(1, path)
        if isinstance(value, str):
            return self._text(value, path, special_only)
        if isinstance(value, (dict, list, tuple)) and len(path) > MAX_DEPTH:
            raise _refusal(path[0], None, f"at most {MAX_DEPTH} levels of nesting")
        if isinstance(value, dict):
            pairs = [(key, item, (*path, key)) for key, item in value.items()]
            return {
                self._key(key, at, special_only): self._copy(item, at, special_only)
                for key, item, at in pairs
            }
        if isinstance(value, (list, tuple)):
            return [self._copy(v, (*path, i), special_only) for i, v in enumerate(value)]
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise _refusal(_spell(path), value, f"whole numbers of at most {MAX_BITS} bits")
        if not (value is None or isinstance(value, int)):
            if not isinstance(value, float) or not math.isfinite(value):
                raise _refusal(_spell(path), value, "a JSON value")
        return value

    def _key(self, key: Any, path: tuple[Any, ...], special_only: bool) -> str:
        if not isinstance(key, str):
            raise _refusal(_spell(path[:-1]), None, "strings as the keys of objects")
        return self._text(key, path, special_only)

    def _text(self, text: str, path: tuple[Any, ...], special_only: bool) -> str:
        self._spend(len(text), path)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{_spell(path)}: character {error.start} is half of a surrogate pair. Send the "
                "whole character, or remove it.",
                str(path[0]).partition("[")[0],
            ) from None
        return self._control.mark(text, special_only) if self._control else text

    def _spend(self, characters: int, path: tuple[Any, ...]) -> None:
        self._remaining -= characters
        if self._remaining < 0:
            raise context_length_error(
                self._max_model_len + 1,
                self._max_model_len,
                str(path[0]).partition("[")[0],
                f"messages, tools and chat_template_kwargs hold more than {self._limit} characters",
            )


def _mark_end(messages: list[Message]) -> str:
    """Append a random word to the last message's content and return it."""
    if not messages or messages[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message=true needs an assistant message at the end. Add one, or remove "
            "the field.",
            "continue_final_message",
        )
    if messages[-1].get("tool_calls"):
        raise RequestError(
            "the last message has tool calls, after which no text can follow. Send their results, "
            "or remove the calls.",
            "continue_final_message",
        )
    word = secrets.token_hex(16)
    # The blank after the word shows whether the template trims the end of the content.
    end = word + " "
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + end
    elif content:
        content[-1]["text"] += end
    else:
        messages[-1]["content"] = end
    return word


def _before(text: str, word: str) -> str:
    """Return the text up to the last occurrence of the word, trimmed if the template trims."""
    head, separator, rest = text.rpartition(word)
    if separator and not rest.startswith(" "):
        return head.rstrip()
    if not separator:
        raise RequestError(
            "continue_final_message=true is not possible: the chat template drops the last "
            "message. Remove the field.",
            "continue_final_message",
        )
    return head


def _message_of(error: Exception) -> str:
    """Return the message of an exception, shortened, or the name of its type."""
    has_message = isinstance(error, (jinja2.TemplateError, TypeError, ValueError))
    text = str(error)[:300] if has_message else ""
    return text or type(error).__name__


def _spell(path: tuple[Any, ...]) -> str:
    """Return a path as text, such as messages[0].content."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{brief(step)[1:-1]}" for step in path[1:]]
    return str(path[0]) + "".join(steps)


def _refusal(path: str, value: Any, allowed: str) -> RequestError:
    """Return the error of a value that is not allowed."""
    fault = f"{path} is not allowed" if value is None else f"{path}={brief(value)} is not allowed"
    return RequestError(
        f"{fault}; allowed: {allowed}. {_REMEDY}", re.split(r"[.\[]", path, maxsplit=1)[0]
    )


def _normalize(message: Any, path: str) -> Message:
    """Return a message as templates expect it: text content, arguments as objects, one reasoning
    field."""
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise _refusal(path, message, "an object with a role and content")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _refusal(
            f"{path}.role", role, "a short name: system, developer, user, assistant or tool"
        )
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = "system" if role == "developer" else role
    sent = message.get("content")
    content = _texts(message.get("refusal") if sent is None else sent, f"{path}.content")
    normal["content"] = content
    for name in _REASONING:
        if not isinstance(normal.get(name, ""), str):
            raise _refusal(f"{path}.{name}", message[name], "a text")
    reasonings = [normal[name] for name in _REASONING if name in normal]
    if reasonings:
        reasoning = next(filter(None, reasonings), "")
        normal = {"thinking": reasoning, **normal, "reasoning_content": reasoning}
    calls = normal.pop("tool_calls", None)
    if not isinstance(calls, list | None):
        raise _refusal(f"{path}.tool_calls", calls, "a list of calls")
    for i, call in enumerate(calls or ()):
        parsed = _call(call, f"{path}.tool_calls[{i}]")
        if isinstance(parsed["function"]["arguments"], str):
            # Templates cannot write such a call, and the conversation must be able to continue.
            normal["content"] = _with_call_text(normal["content"], parsed["function"])
        else:
            normal.setdefault("tool_calls", []).append(parsed)
    return normal


def _with_call_text(
    content: str | list[dict[str, str]], function: Message
) -> str | list[dict[str, str]]:
    """Return the content followed by the text of a call whose arguments are not a JSON object.

    Answers repeat the text of such a call in their content; then it is not added again.
    """
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if function["arguments"] in text:
        return content
    call = f"{function['name']} {function['arguments']}"
    if isinstance(content, list):
        return [*content, {"type": "text", "text": call}]
    return f"{content}\n{call}" if content else call


def _texts(content: Any, path: str) -> str | list[dict[str, str]]:
    """Return the content as a string, or as text parts if it is a list."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | dict):
        raise _refusal(path, content, "a text, or a list of text parts")
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        known = isinstance(kind, str) and kind in _TEXTS
        text = part.get(_TEXTS[kind]) if known and isinstance(part, dict) else part
        if not known or not isinstance(text, str):
            raise RequestError(
                f"{path} has a part of type {brief(kind)}: {brief(part)}; allowed: text. "
                "Send text parts only.",
                "messages",
            )
        texts.append({"type": "text", "text": text})
    return texts


def _calls_of(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _argument_text(call: Any) -> str | None:
    """Return the arguments of a client's call as text; None if they are not an object."""
    arguments = call.get("function", call).get("arguments")
    if not isinstance(arguments, str):
        return _json(arguments or {})
    return (arguments or "{}") if isinstance(_object(arguments), dict) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Any, path: str) -> Message:
    """Return a call with its arguments as an object, or as text if they are not a JSON object.

    Raises: RequestError.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _refusal(path, call, "an object with a function that has a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        value = _object(arguments)
        arguments = value if isinstance(value, dict) else arguments
    if not isinstance(arguments, dict | str | None):
        raise RequestError(
            f"{path} has arguments that are neither text nor an object: {brief(arguments)}. "
            "Send back the arguments as they were received.",
            "messages",
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _object(text: str) -> Any:
    """Return the value of JSON text; {} for "", the text itself if no template can write its value.

    Models write numbers beyond all floats, which become the largest ones, and halves of surrogate
    pairs, which become U+FFFD.
    """
    if not text:
        return {}
    try:
        value = json.loads(
            text, parse_float=_finite, parse_int=_whole_number, parse_constant=_whole_number
        )
        if is_deep(value):
            return text
        # Halves come from escapes: a text that has one itself is refused with its message.
        written = _json(value) if "\\u" in text else ""
        replaced = written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value if replaced == written else json.loads(replaced)
    except (ValueError, RecursionError):
        return text


def _finite(digits: str) -> float:
    return finite(float(digits))


def _whole_number(digits: str) -> int:
    """Return a whole number. Raises ValueError for NaN, infinities, and more than MAX_BITS bits."""
    value = int(digits)
    if value.bit_length() > MAX_BITS:
        raise ValueError("too many digits")
    return value
