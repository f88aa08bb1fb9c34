"""Tool calls as Qwen3 and Hermes write them: <tool_call>{"name": ..., "arguments": {...}}."""

import json
from typing import Any

from lockstep.text.parsers.events import CallArguments, CallStart, Content, Event
from lockstep.text.scan import Markers

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_OUTSIDE, _INSIDE = Markers({"call": _CALL}), Markers({"end": _CALL_END})


class HermesParser:
    """The JSON grammar. A call is told once it is whole; what is no call stays content."""

    SIGN = "<function-name>"

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._buffer = self._call = self._blank = ""
        self._inside = False
        self._index = -1

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        self._buffer += text
        events: list[Event] = []
        self._run(events, final=False)
        return events

    def finish(self) -> list[Event]:
        """What was held back; a call that lacks only its closing tag counts."""
        events: list[Event] = []
        self._run(events, final=True)
        if self._inside:
            self._emit(events, "")
        if self._blank and self._index < 0:
            events.append(Content(self._blank))
        return events

    def _run(self, events: list[Event], final: bool) -> None:
        while self._buffer:
            markers = _INSIDE if self._inside else _OUTSIDE
            text, marker, self._buffer = markers.take(self._buffer, final)
            if self._inside:
                self._call += text
                if marker is not None:
                    self._emit(events, _CALL_END)
            else:
                self._tell(events, text, marker is not None)
            if marker is None:
                return

    def _tell(self, events: list[Event], text: str, call: bool) -> None:
        """Shows text; blanks wait, since those around calls belong to the grammar."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            events.append(Content(shown))
        self._inside, self._call = call, ""

    def _emit(self, events: list[Event], closer: str) -> None:
        self._inside = False
        try:
            call = json.loads(self._call)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            if not isinstance(name, str):
                raise TypeError(name)
        except (ValueError, KeyError, TypeError, AttributeError):
            events.append(Content(self._blank + _CALL + self._call + closer))
            self._blank = ""
            return
        self._blank = ""
        self._index += 1
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        events += [CallStart(self._index, name), CallArguments(self._index, text)]
