"""Reasoning between <think> and </think>, as Qwen, Nemotron-3 and DeepSeek write it.

The prompt's end says where the answer begins: inside of reasoning (after "<think>"), in content
(after "</think>"), or open, where an answer that starts with "<think>" reasons first.
"""

from lockstep.text.parsers.events import Content, Event, Reasoning
from lockstep.text.scan import Markers

_INSIDE = Markers({"end": "</think>", "call": "<tool_call>"})


class ThinkParser:
    """Splits an answer into reasoning and content; without </think> all of it is reasoning."""

    SIGN = "</think>"

    def __init__(self, prompt: str) -> None:
        end = prompt.rstrip()
        ended, begun = end.endswith("</think>"), end.endswith("<think>")
        self._state = "content" if ended else "begin" if begun else "open"
        self._begun = begun
        self._buffer = ""

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        return self._run(text, final=False)

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        return self._run("", final=True)

    def _run(self, text: str, final: bool) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        if self._state in ("open", "begin"):
            self._begin(final)
        if self._state == "lead":
            self._buffer = self._buffer.lstrip("\n")
            self._state = "reasoning" if self._buffer else "lead"
        if self._state == "reasoning":
            self._reason(events, final)
        if self._state == "after":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "content"
        if self._state == "content" and self._buffer:
            events.append(Content(self._buffer))
            self._buffer = ""
        return events

    def _begin(self, final: bool) -> None:
        """Drops whitespace and an opening tag; decides whether the answer reasons."""
        rest = self._buffer.lstrip()
        if rest.startswith("<think>"):
            self._state, self._buffer = "lead", rest.removeprefix("<think>")
        elif not final and "<think>".startswith(rest):
            return
        else:
            self._state = "lead" if self._begun else "content"

    def _reason(self, events: list[Event], final: bool) -> None:
        text, marker, rest = _INSIDE.take(self._buffer, final)
        done = marker is not None or final
        shown = text.rstrip("\n")
        if shown:
            events.append(Reasoning(shown))
        self._buffer = rest if done else text[len(shown) :] + rest
        if marker is not None:
            self._state = "after"
        if marker == "call":
            self._buffer = "<tool_call>" + rest
