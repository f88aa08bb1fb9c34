"""Tool calls as Qwen3.5, Qwen3.6, Qwen3-Coder and Nemotron-3 write them.

<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>, each tag on
its own line. Values are raw text, typed by the tool's schema. Missing closers are forgiven.
"""

from typing import Any

from lockstep.text.parsers.events import CallArguments, CallStart, Content, Event
from lockstep.text.parsers.schema import coerce, parameters_by_name, property_types, to_json
from lockstep.text.scan import Markers, Scan, Tail

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
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

    def __init__(self, tools: Any) -> None:
        self._parameters = parameters_by_name(tools)
        self._types_of: dict[tuple[str, str], set[str]] = {}
        self._state = "content"
        self._scan = Scan(_MARKERS[self._state])
        self._blank = Tail()
        self._index = -1
        self._open = False  # a call has begun
        self._inside = False  # text stands inside <tool_call>
        self._name = ""
        self._keys = 0
        self._text: list[str] = []  # of a name, a key, or a value that does not stream
        self._types: set[str] = set()
        self._streams = False
        self._started = False
        self._newline = False  # a value's last newline waits, since the end of it belongs to a tag

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        events: list[Event] = []
        place = 0
        while place < len(text):
            taken, marker, place = self._scan.take(text, place)
            getattr(self, f"_in_{self._state}")(events, taken, marker)
        return events

    def finish(self) -> list[Event]:
        """What was held back; an unfinished call is closed with the arguments it has."""
        events: list[Event] = []
        held = self._scan.flush()
        if self._state == "value":
            self._in_value(events, "" if held.rstrip() == _FUNCTION_END else held, "end")
        elif self._state == "content":
            self._in_content(events, held, None)
        self._close(events)
        blank = self._blank.flush()
        if blank and self._index < 0:
            events.append(Content(blank))
        return events

    def _enter(self, state: str) -> None:
        if state != self._state:
            self._state = state
            self._scan = Scan(_MARKERS[state])

    def _in_content(self, events: list[Event], text: str, marker: str | None) -> None:
        if shown := self._blank.take(text):
            events.append(Content(shown))
        if marker is not None:
            self._blank.flush()
        self._open_tag(marker)

    def _in_call(self, events: list[Event], text: str, marker: str | None) -> None:
        if marker == "call_end":
            self._leave()
        else:
            self._open_tag(marker)

    def _in_name(self, events: list[Event], text: str, marker: str | None) -> None:
        self._text.append(text)
        if marker is None:
            return
        name = self._whole()
        if name:
            self._index += 1
            self._open = True
            self._name = name
            self._keys = 0
            events.append(CallStart(self._index, name))
        self._enter("function")
        if marker != "end":
            self._end_function(events, marker)

    def _in_function(self, events: list[Event], text: str, marker: str | None) -> None:
        if marker == "parameter":
            self._enter("key")
        elif marker is not None:
            self._end_function(events, marker)

    def _in_key(self, events: list[Event], text: str, marker: str | None) -> None:
        self._text.append(text)
        if marker is None:
            return
        key = self._whole()
        if marker != "end":
            self._end_function(events, marker)
            return
        self._types = self._allowed(key)
        self._streams = self._types <= {"string"}
        self._started = False
        self._newline = False
        head = "{" if self._keys == 0 else ", "
        quote = '"' if self._streams else ""
        self._arguments(events, f"{head}{to_json(key)}: {quote}")
        self._keys += 1
        self._enter("value")

    def _in_value(self, events: list[Event], text: str, marker: str | None) -> None:
        if text and not self._started:
            text = text.removeprefix("\n")
            self._started = True
        if text:
            text = "\n" * self._newline + text
            self._newline = text.endswith("\n")
            text = text[:-1] if self._newline else text
        if self._streams:
            self._arguments(events, to_json(text)[1:-1])
        else:
            self._text.append(text)
        if marker is None:
            return
        self._end_value(events)
        if marker == "parameter":
            self._enter("key")
        elif marker != "end":
            self._end_function(events, "call_end")

    def _end_value(self, events: list[Event]) -> None:
        self._enter("function")
        if self._streams:
            self._arguments(events, '"')
            return
        value = coerce("".join(self._text), self._types)
        self._text.clear()
        self._arguments(events, to_json(value))

    def _end_function(self, events: list[Event], marker: str) -> None:
        """The function ended, by its own tag or by one that cannot stand inside it."""
        self._close(events)
        self._enter("call" if self._inside else "content")
        if marker == "call_end":
            self._leave()
        elif marker != "function_end":
            self._open_tag(marker)

    def _open_tag(self, marker: str | None) -> None:
        if marker == "call":
            self._inside = True
            self._enter("call")
        elif marker == "function":
            self._enter("name")

    def _leave(self) -> None:
        self._inside = False
        self._enter("content")

    def _close(self, events: list[Event]) -> None:
        if self._open:
            self._arguments(events, "}" if self._keys else "{}")
        self._open = False

    def _whole(self) -> str:
        """The name or key that was collected."""
        whole = "".join(self._text).strip()
        self._text.clear()
        return whole

    def _allowed(self, key: str) -> set[str]:
        place = self._name, key
        if place not in self._types_of:
            self._types_of[place] = property_types(self._parameters.get(self._name), key)
        return self._types_of[place]

    def _arguments(self, events: list[Event], text: str) -> None:
        if text and self._open:
            events.append(CallArguments(self._index, text))
