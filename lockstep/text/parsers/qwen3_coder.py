"""Tool calls as Qwen3.5, Qwen3.6, Qwen3-Coder and Nemotron-3 write them.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, each tag on
its own line. Values are raw text, typed by the tool's schema. Missing closers are forgiven.
"""

import json
import re
from typing import Any

from lockstep.text.parsers.events import CallArguments, CallStart, Content, Event, parameters_of
from lockstep.text.parsers.schema import coerce, types_of
from lockstep.text.scan import Markers

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_CLOSERS = {"function_end": _FUNCTION_END, "call_end": _CALL_END}
_OPENERS = {"call": _CALL, "function": _FUNCTION}
_MARKERS = {
    "content": Markers(_OPENERS),
    "call": Markers({**_OPENERS, "call_end": _CALL_END}),
    "name": Markers({"end": ">", **_OPENERS, **_CLOSERS}),
    "function": Markers({"parameter": "< parameter =", **_OPENERS, **_CLOSERS}, loose=True),
    "key": Markers({"end": ">", **_OPENERS, **_CLOSERS}),
    # A value may be code: `a < parameter == b` is text, so is </function> with no </tool_call>.
    "value": Markers(
        {
            "end": "</parameter>",
            "parameter": "<parameter=",
            "call_end": f"{_FUNCTION_END} {_CALL_END}",
            "bare_end": _CALL_END,
        },
        loose=True,
    ),
}


class Qwen3CoderParser:
    """The XML grammar. Strings stream as they come; other values once they are whole."""

    SIGN = _FUNCTION

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._tools = tools
        self._state = "content"
        self._buffer = self._blank = ""
        self._index = -1
        self._schema: dict[str, Any] = {}
        self._types: set[str] = set()
        self._open = self._inside = False  # a call has begun; text stands inside <tool_call>
        self._keys = 0
        self._value = ""
        self._started = self._streams = False

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        self._buffer += text
        events: list[Event] = []
        self._run(events, final=False)
        return events

    def finish(self) -> list[Event]:
        """What was held back; an unfinished call is closed with the arguments it has."""
        events: list[Event] = []
        if self._state == "value":
            self._buffer = re.sub(rf"{_FUNCTION_END}\s*\Z", "", self._buffer)
        self._run(events, final=True)
        if self._state == "value":
            self._end_value(events)
        self._close(events)
        if self._blank and self._index < 0:
            events.append(Content(self._blank))
            self._blank = ""
        return events

    def _run(self, events: list[Event], final: bool) -> None:
        while self._buffer:
            text, marker, rest = _MARKERS[self._state].take(self._buffer, final)
            getattr(self, f"_in_{self._state}")(events, text, marker, rest)
            if marker is None:
                return

    def _in_content(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        text = self._blank + text
        shown = text.rstrip()
        self._blank = "" if marker else text[len(shown) :]
        if shown:
            events.append(Content(shown))
        self._buffer = rest
        self._open_tag(marker)

    def _in_call(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        self._buffer = rest
        if marker == "call_end":
            self._leave()
        else:
            self._open_tag(marker)

    def _in_name(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        if marker is None:  # the name is taken whole, so all of it waits
            self._buffer = text + rest
            return
        self._buffer = rest
        name = text.strip()
        if name:
            self._index += 1
            self._open, self._keys = True, 0
            self._schema = parameters_of(self._tools, name)
            events.append(CallStart(self._index, name))
        self._state = "function"
        if marker != "end":
            self._end_function(events, marker)

    def _in_function(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        self._buffer = rest
        if marker == "parameter":
            self._state = "key"
        elif marker is not None:
            self._end_function(events, marker)

    def _in_key(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        if marker is None:
            self._buffer = text + rest
            return
        self._buffer = rest
        if marker != "end":
            self._end_function(events, marker)
            return
        key = text.strip()
        properties = self._schema.get("properties") or {}
        self._types = types_of(properties.get(key), self._schema)
        self._streams = self._types <= {"string"}
        self._value, self._started = "", False
        head = "{" if self._keys == 0 else ", "
        quote = '"' if self._streams else ""
        self._arguments(events, f"{head}{json.dumps(key, ensure_ascii=False)}: {quote}")
        self._keys += 1
        self._state = "value"

    def _in_value(self, events: list[Event], text: str, marker: str | None, rest: str) -> None:
        self._buffer = rest
        if text and not self._started:
            text, self._started = text.removeprefix("\n"), True
        self._value += text
        if self._streams and self._value:
            cut = len(self._value) - self._value.endswith("\n")
            self._arguments(events, json.dumps(self._value[:cut], ensure_ascii=False)[1:-1])
            self._value = self._value[cut:]
        if marker is None:
            return
        self._end_value(events)
        if marker == "parameter":
            self._state = "key"
        elif marker != "end":
            self._end_function(events, "call_end")

    def _end_value(self, events: list[Event]) -> None:
        self._state = "function"
        if self._streams:
            self._arguments(events, '"')
        else:
            value = coerce(self._value.removesuffix("\n"), self._types)
            self._arguments(events, json.dumps(value, ensure_ascii=False))
        self._value = ""

    def _end_function(self, events: list[Event], marker: str) -> None:
        """The function ended, by its own tag or by one that cannot stand inside it."""
        self._close(events)
        self._state = "call" if self._inside else "content"
        if marker == "call_end":
            self._leave()
        elif marker != "function_end":
            self._open_tag(marker)

    def _open_tag(self, marker: str | None) -> None:
        if marker == "call":
            self._state, self._inside = "call", True
        elif marker == "function":
            self._state = "name"

    def _leave(self) -> None:
        self._state, self._inside = "content", False

    def _close(self, events: list[Event]) -> None:
        if self._open:
            self._arguments(events, "}" if self._keys else "{}")
        self._open = False

    def _arguments(self, events: list[Event], text: str) -> None:
        if text and self._open:
            events.append(CallArguments(self._index, text))
