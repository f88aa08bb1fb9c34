"""Tool calls as Qwen3 and Hermes write them: <tool_call>{"name": ..., "arguments": {...}}."""

from typing import Any

from lockstep.text.parsers.events import CallArguments, CallStart, Content, Event
from lockstep.text.parsers.schema import from_json, to_json
from lockstep.text.scan import Markers, Scan, Tail

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_OUTSIDE = Markers({"call": _CALL})
_INSIDE = Markers({"end": _CALL_END})


class HermesParser:
    """The JSON grammar. A call is told once it is whole; what is no call stays content."""

    SIGN = "<function-name>"

    def __init__(self, tools: Any) -> None:
        self._scan = Scan(_OUTSIDE)
        self._blank = Tail()
        self._call: list[str] = []
        self._inside = False
        self._index = -1

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        events: list[Event] = []
        place = 0
        while place < len(text):
            taken, marker, place = self._scan.take(text, place)
            self._take(events, taken)
            if marker is not None:
                self._turn(events, _CALL_END)
        return events

    def finish(self) -> list[Event]:
        """What was held back; a call that lacks only its closing tag counts."""
        events: list[Event] = []
        self._take(events, self._scan.flush())
        if self._inside:
            self._turn(events, "")
        blank = self._blank.flush()
        if blank and self._index < 0:
            events.append(Content(blank))
        return events

    def _take(self, events: list[Event], text: str) -> None:
        """Blanks wait, since those around calls belong to the grammar."""
        if self._inside:
            self._call.append(text)
        elif shown := self._blank.take(text):
            events.append(Content(shown))

    def _turn(self, events: list[Event], closer: str) -> None:
        """A call begins, or it ends with this tag."""
        self._inside = not self._inside
        self._scan = Scan(_INSIDE if self._inside else _OUTSIDE)
        if self._inside:
            return
        text = "".join(self._call)
        blank = self._blank.flush()
        self._call.clear()
        try:
            name, arguments = _read(text)
        except ValueError:
            events.append(Content(blank + _CALL + text + closer))
            return
        self._index += 1
        events += [CallStart(self._index, name), CallArguments(self._index, arguments)]


def _read(text: str) -> tuple[str, str]:
    """The name and the arguments (JSON text of an object) of a call. Raises ValueError."""
    call = from_json(text)
    if not isinstance(call, dict):
        raise ValueError("a call is an object")
    name = call.get("name")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = from_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise ValueError("a call has a name, and arguments that are an object")
    name.encode()
    return name, to_json(arguments or {})
