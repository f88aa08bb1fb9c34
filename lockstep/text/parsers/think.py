"""Reasoning between <think> and </think>, as Qwen, Nemotron-3 and DeepSeek write it.

The prompt's end says where the answer begins: inside of reasoning (after "<think>"), in content
(after "</think>"), or open, where an answer that starts with "<think>" reasons first.
"""

from collections.abc import Sequence

from lockstep.text.parsers.events import Content, Event, Reasoning
from lockstep.text.scan import Markers, Scan, Tail

_THINK = "<think>"
_THINK_END = "</think>"


class ThinkParser:
    """Splits an answer into reasoning and content; without </think> all of it is reasoning.

    openers: what begins a tool call, and ends reasoning as well.
    """

    TAGS = (_THINK, _THINK_END)
    """What begins reasoning, and what ends it."""

    SIGNS = (_THINK_END,)

    def __init__(self, prompt: str, openers: Sequence[str] = ()) -> None:
        end = prompt.rstrip()
        self._begun = end.endswith(_THINK)
        self._state = "content" if end.endswith(_THINK_END) else "begin"
        self._blank: list[str] = []  # whitespace before the first word
        self._word = ""  # the first word, as long as it may become <think>
        self._scan = Scan(Markers({"end": _THINK_END, **{opener: opener for opener in openers}}))
        self._newlines = Tail("\n")

    @classmethod
    def texts(cls) -> set[str]:
        """The tags: tokens that must be seen, though they may be special."""
        return {_THINK, _THINK_END}

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        return self._state in ("lead", "reasoning") or (self._state == "begin" and self._begun)

    @property
    def over(self) -> bool:
        """Whether no reasoning comes any more."""
        return self._state in ("after", "content")

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        events: list[Event] = []
        if self._state == "begin":
            text = self._begin(text)
        if self._state == "lead":
            text = text.lstrip("\n")
            self._state = "reasoning" if text else "lead"
        if self._state == "reasoning":
            text = self._reason(events, text)
        if self._state == "after":
            text = text.lstrip("\n")
            self._state = "content" if text else "after"
        if self._state == "content" and text:
            events.append(Content(text))
        return events

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        events = self.feed(self._decide()) if self._state == "begin" else []
        if self._state == "reasoning":
            self._think(events, self._scan.flush())
        return events

    def _begin(self, text: str) -> str:
        """Drops whitespace and an opening tag; returns what comes then, once that is decided."""
        if not self._word:
            word = text.lstrip()
            self._blank.append(text[: len(text) - len(word)])
            text = word
        self._word += text
        if self._word.startswith(_THINK):
            self._state = "lead"
            return self._word.removeprefix(_THINK)
        return "" if _THINK.startswith(self._word) else self._decide()

    def _decide(self) -> str:
        """The answer opens without a tag; returns its text so far."""
        self._state = "lead" if self._begun else "content"
        return "".join(self._blank) + self._word

    def _reason(self, events: list[Event], text: str) -> str:
        """Takes reasoning; returns the text behind it once it has ended."""
        found = self._scan.take(text)
        self._think(events, found.text)
        if found.marker is None:
            return ""
        self._state = "after"
        return ("" if found.marker == "end" else found.marker) + text[found.end :]

    def _think(self, events: list[Event], text: str) -> None:
        if shown := self._newlines.take(text):
            events.append(Reasoning(shown))
