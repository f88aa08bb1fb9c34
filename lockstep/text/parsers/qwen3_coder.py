"""Tool calls of Qwen3.5, Qwen3.6, Qwen3-Coder and Nemotron-3.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, each tag on
its own line. Values are raw text, typed by the tool's schema. Missing closing tags are tolerated.
Text at a wrong place is content. If it is inside of a call, it follows the call: the APIs stream a
call as one block. Tags inside of a JSON string are text.
"""

import re
from typing import Any

from lockstep.text.grammars.lark import Rules, Tool, literal, sequence
from lockstep.text.parsers.call_parser import ENDED, CallParser
from lockstep.text.parsers.events import CallError
from lockstep.text.parsers.json_reader import Quotes
from lockstep.text.parsers.plain_values import PlainValues
from lockstep.text.parsers.schema import coerce, parameters_by_name, property_types, to_json
from lockstep.text.scan import Markers

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_UNCLOSED = "</parameter"
_LAST_TAGS = re.compile(rf"(?:{_UNCLOSED}\s*)?(?:{_FUNCTION_END}\s*)?")
"""Tags that may end a text inside of a value, where no further text decides what they are."""
UNNAMED = "a parameter's tag without its name or its >"
_CLOSERS = {"function_end": _FUNCTION_END, "call_end": _CALL_END}
_OPENERS = {"call": _CALL, "function": _FUNCTION}
_NAME_ENDS = {"end": ">", **_OPENERS, **_CLOSERS}
_MARKERS = {
    "content": Markers(_OPENERS),
    "broken": Markers({**_OPENERS, "call_end": _CALL_END}),
    "call": Markers({**_OPENERS, "call_end": _CALL_END}),
    "name": Markers(_NAME_ENDS),
    "function": Markers({"parameter": "< parameter =", **_OPENERS, **_CLOSERS}, loose=True),
    "key": Markers({"parameter": _PARAMETER, "parameter_end": _PARAMETER_END, **_NAME_ENDS}),
    "skipped": Markers(
        {"parameter": _PARAMETER, "parameter_end": _PARAMETER_END, **_OPENERS, **_CLOSERS}
    ),
    # A value may be code: `a < parameter == b` is text, as is </function> without </tool_call>.
    "value": Markers(
        {
            "end": _PARAMETER_END,
            "parameter": _PARAMETER,
            "call_end": f"{_FUNCTION_END} {_CALL_END}",
            "bare_end": _CALL_END,
            # A closing tag without its > ends the value if another tag follows.
            "unclosed_parameter": f"{_UNCLOSED} {_PARAMETER}",
            "unclosed_call_end": f"{_UNCLOSED} {_FUNCTION_END} {_CALL_END}",
            "unclosed_bare_end": f"{_UNCLOSED} {_CALL_END}",
        },
        loose=True,
    ),
}


class Qwen3CoderParser(CallParser):
    """Parser of the XML syntax. Strings stream as they are generated; other values once
    complete."""

    SIGNS = (_FUNCTION,)
    OPENERS = _OPENERS
    CLOSERS = {"call_end": _CALL_END}
    ENDS_REASONING = (_CALL, _FUNCTION)
    MARKERS = _MARKERS
    TAGS = (f"{_CALL}\n", f"\n{_CALL_END}")

    @classmethod
    def head(cls, name: str) -> str:
        """Return the function's tag."""
        return f"{_FUNCTION}{name}>\n"

    PLAIN_VALUES = True

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return the call: required parameters must be written, others may, in the schema's
        order."""
        marks = (_PARAMETER_END, _PARAMETER, _CALL_END)
        values = PlainValues(tool, rules, f"\n{_PARAMETER_END}\n", marks)
        parts = []
        for key, schema, required in tool.properties():
            head = f"{_PARAMETER}{key}>\n"
            if not _is_name(key) or key != key.strip():
                why = "no parameter of this name can be written in this model's tool calls"
                tool.refuse(key, "properties", why, "Rename it.")
            one = sequence(literal(head), values.value(key, schema))
            parts.append(one if required else f"({one})?")
        if tool.is_open:
            parts.append(f"(/<parameter=[^\\s<>]+>\\n/ {values.value('*', tool.more)})*")
        return sequence(rules.text(cls.head(tool.name)), *parts, rules.text(_FUNCTION_END))

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._parameters = parameters_by_name(tools)
        self._types_of: dict[tuple[str, str], set[str]] = {}
        self._inside = False  # inside of <tool_call>
        self._name = ""
        self._keys: set[str] = set()  # parameters read so far: JSON allows each key once
        self._text: list[str] = []  # text of a name, a key, or a value that does not stream
        self._types: set[str] = set()
        self._streams = False
        self._quotes = Quotes()
        self._started = False
        self._strayed = False  # text outside of parameters was reported
        self._strays: list[str] = []  # text outside of parameters of the current call
        self._newline = (
            False  # a value's final newline is delayed: it may belong to the closing tag
        )

    def _finish(self, why: str) -> None:
        """Complete a function whose closing tags the model left out."""
        if not self._open:
            if "".join(self._raw).strip():
                self._fail(why)
            else:
                self._enter("content")
            return
        pending = self._reader.flush()
        if self._state == "value":
            self._events.append(CallError(ENDED))
            self._add("" if _LAST_TAGS.fullmatch(pending) else pending)
            self._end_value()
        elif self._state == "key":
            self._stray("".join([*self._text, pending]))
        else:
            self._stray(pending)
        self._close()
        self._complete()
        self._enter("content")

    def _opened(self, marker: str) -> None:
        self._text.clear()
        self._inside = marker == "call"
        self._enter("call" if self._inside else "name")

    def _in_call(self, text: str, marker: str | None) -> None:
        if text.strip():
            self._fail("text that is not a function", text, marker)
        elif marker == "call_end":
            self._leave()
        else:
            self._open_tag(marker)

    def _in_name(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        if marker is None:
            return
        self._name = self._take_text()
        if not _is_name(self._name):
            why = "a function's tag without its >" if self._name else "a function without a name"
            self._fail(why, "", marker)
            return
        self._keys.clear()
        self._strayed = False
        self._call(self._name)
        # At once: otherwise a cut call would have complete, empty arguments.
        self._arguments("{")
        self._enter("function")
        if marker != "end":
            self._end_function(marker)

    def _in_function(self, text: str, marker: str | None) -> None:
        self._stray(text)
        if marker == "parameter":
            self._text.clear()
            self._enter("key")
        elif marker is not None:
            self._end_function(marker)

    def _in_key(self, text: str, marker: str | None) -> None:
        self._text.append(text)
        if marker is None:
            return
        key = self._take_text()
        if marker != "end" or not _is_name(key) or key in self._keys:
            why = "a repeated parameter" if key in self._keys else UNNAMED
            self._stray(key + ">" * (marker == "end"), why)
            self._leave_parameter("skipped" if marker == "end" else marker)
            return
        self._types = self._allowed(key)
        self._streams = self._types <= {"string"}
        self._quotes = Quotes()
        self._started = False
        self._newline = False
        head = ", " if self._keys else ""
        quote = '"' if self._streams else ""
        self._arguments(f"{head}{to_json(key)}: {quote}")
        self._keys.add(key)
        self._enter("value")

    def _in_skipped(self, text: str, marker: str | None) -> None:
        """Read the text of a parameter with a malformed tag, up to the next tag."""
        self._stray(text)
        if marker is not None:
            self._leave_parameter(marker)

    def _leave_parameter(self, marker: str) -> None:
        """Enter the state that follows a malformed parameter."""
        if marker == "parameter":
            self._text.clear()
            self._enter("key")
        elif marker == "skipped":
            self._enter("skipped")
        elif marker == "parameter_end":
            self._enter("function")
        else:
            self._end_function(marker)

    def _in_value(self, text: str, marker: str | None) -> None:
        if not self._streams:
            self._quotes.take(text)
        if marker is not None and self._quotes.inside:
            self._quotes.take(self._written)
            text += self._written
            marker = None
        self._add(text)
        if marker is None:
            return
        self._end_value()
        if marker in ("parameter", "unclosed_parameter"):
            self._enter("key")
        elif marker != "end":
            self._end_function("call_end")

    def _add(self, text: str) -> None:
        """Append text of a value."""
        if text and not self._started:
            text = text.removeprefix("\n")
            self._started = True
        if text:
            text = "\n" * self._newline + text
            self._newline = text.endswith("\n")
            text = text[:-1] if self._newline else text
        if self._streams:
            self._arguments(to_json(text)[1:-1])
        else:
            self._text.append(text)

    def _end_value(self) -> None:
        self._enter("function")
        if self._streams:
            self._arguments('"')
            return
        value = coerce("".join(self._text), self._types)
        self._text.clear()
        self._arguments(to_json(value))

    def _stray(self, text: str, why: str = "text outside of a function's parameters") -> None:
        """Emit text that belongs to no parameter as content, with one error event per function."""
        if not self._strayed:
            text = text.lstrip()
            if not text:
                return
            self._strayed = True
            self._events.append(CallError(why))
        self._strays.append(text)

    def _complete(self) -> None:
        super()._complete()
        self._emit_strays()

    def _abandon(self) -> None:
        super()._abandon()
        self._emit_strays()

    def _emit_strays(self) -> None:
        """Emit the text outside of parameters, once nothing more is emitted of its call."""
        if self._strays and not self._open:
            strays = self._strays
            self._strays = []
            self._content("".join(strays))

    def _end_function(self, marker: str) -> None:
        """End the function at its closing tag, or at a tag that cannot be inside of it."""
        self._close()
        self._enter("call" if self._inside else "content")
        if marker == "call_end":
            self._leave()
        elif marker != "function_end":
            self._open_tag(marker)

    def _open_tag(self, marker: str | None) -> None:
        if marker == "call":
            self._begin(marker)
        elif marker == "function":
            if not self._raw:
                self._raw = [_FUNCTION]
            self._enter("name")

    def _leave(self) -> None:
        self._inside = False
        self._complete()
        self._raw.clear()
        self._enter("content")

    def _close(self) -> None:
        if self._open:
            self._arguments("}")
            self._closed()
        if not self._inside:
            self._complete()

    def _take_text(self) -> str:
        """Return the collected name or key and clear it."""
        text = "".join(self._text).strip()
        self._text.clear()
        return text

    def _allowed(self, key: str) -> set[str]:
        key_path = self._name, key
        if key_path not in self._types_of:
            self._types_of[key_path] = property_types(self._parameters.get(self._name), key)
        return self._types_of[key_path]


def _is_name(text: str) -> bool:
    """Return whether a tag may contain this name: one line without a tag."""
    ends = (*_NAME_ENDS.values(), _PARAMETER, _PARAMETER_END, "\n")
    return bool(text) and not any(end in text for end in ends)
