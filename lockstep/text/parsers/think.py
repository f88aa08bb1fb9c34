"""Parser of reasoning between <think> and </think>, as Qwen, Nemotron-3 and DeepSeek write it.

The prompt's end decides where the answer begins: inside of reasoning (after "<think>"), in content
(after "</think>"), or undecided, where an answer that starts with "<think>" reasons first.
"""

from collections.abc import Callable, Sequence

from lockstep.text.parsers.events import (
    NATURAL_END,
    CallReader,
    CallStart,
    Content,
    Event,
    Reasoning,
    TextEnd,
)
from lockstep.text.scan import Markers, Scan, Tail, Taken

_THINK = "<think>"
_THINK_END = "</think>"


class ThinkParser:
    """Parser that splits an answer into reasoning and content; without </think> it is all
    reasoning.

    openers: markers that begin a tool call. A call of one of the tools ends reasoning as well. An
    opener that begins no such call belongs to the reasoning, for example if the model thinks about
    the tag.
    """

    TAGS = (_THINK, _THINK_END)
    """Opening and closing tag of reasoning."""

    SIGNS = (_THINK_END,)

    def __init__(self, prompt: str, openers: Sequence[str] = ()) -> None:
        end = prompt.rstrip()
        self._in_prompt = end.endswith(_THINK)
        self._state = "content" if end.endswith(_THINK_END) else "begin"
        self._blank: list[str] = []  # whitespace before the first word
        self._word = ""  # the first word, as long as it may become <think>
        self._scan = Scan(Markers({"end": _THINK_END, **{opener: opener for opener in openers}}))
        self._newlines = Tail("\n")
        self._new_parser: Callable[[], CallReader] | None = None
        self._trial: CallReader | None = None  # parses the text after an opener until it is decided
        self._kept: list[str] = []  # the opener and the text after it
        self._is_thought = False  # the text that the trial reads is not a call
        self.ended_by_call = False

    @classmethod
    def texts(cls) -> set[str]:
        """Return the tags: tokens that must be shown even if they are special."""
        return {_THINK, _THINK_END}

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends inside of reasoning."""
        return self._state in ("lead", "reasoning") or (self._state == "begin" and self._in_prompt)

    @property
    def ended(self) -> bool:
        """Return whether reasoning has ended."""
        return self._state in ("after", "content")

    def use_calls(self, new_parser: Callable[[], CallReader]) -> None:
        """Set the factory of parsers that decide whether a call opener begins a call."""
        self._new_parser = new_parser

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return the events that became certain."""
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

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        events = self.feed(self._decide()) if self._state == "begin" else []
        if self._state == "reasoning":
            text = self._scan.flush()
            if self._trial is None:
                self._think(events, text)
            elif self._begins_call(self._trial, text):
                self._end_by_call()
                events.append(Content("".join(self._kept)))
            else:
                self._think(events, "".join(self._kept))
        return events

    def _begin(self, text: str) -> str:
        """Drop whitespace and an opening tag; return the text after them once it is decided."""
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
        """Decide that the answer begins without a tag; return its text so far."""
        self._state = "lead" if self._in_prompt else "content"
        return "".join(self._blank) + self._word

    def _reason(self, events: list[Event], text: str) -> str:
        """Parse reasoning. Return the text after it once it has ended."""
        at = 0
        while at < len(text):
            taken = self._scan.take(text, at)
            at = taken.end
            if self._trial is None:
                self._think(events, taken.text)
            elif self._begins_call(self._trial, taken.text):
                self._end_by_call()
                # The scan still delays what may become a marker; it belongs to the call.
                rest = self._scan.flush() if taken.marker is None else taken.written
                return "".join([*self._kept, rest, text[at:]])
            elif self._is_undecided(self._trial, taken):
                continue
            else:
                self._trial = None
                self._think(events, "".join(self._kept))
            if taken.marker == "end":
                self._state = "after"
                return text[at:]
            if taken.marker is not None:
                if self._new_parser is None:
                    self._end_by_call()
                    return taken.written + text[at:]
                self._begin_trial(self._new_parser(), taken.written)
        return ""

    def _begin_trial(self, trial: CallReader, opener: str) -> None:
        """Start a parser that decides whether this opener begins a call."""
        trial.feed(opener)
        self._trial = trial
        self._kept = [opener]
        self._is_thought = False

    def _begins_call(self, trial: CallReader, text: str) -> bool:
        """Return whether this text after an opener begins a call of a tool that was sent.

        Set `_is_thought` if it certainly begins none.
        """
        self._kept.append(text)
        events = trial.feed(text)
        if not events:
            return False
        first = events[0]
        names = trial.tool_names
        is_call = isinstance(first, CallStart) and (not names or first.name in names)
        self._is_thought = not is_call
        return is_call

    def _is_undecided(self, trial: CallReader, taken: Taken) -> bool:
        """Return whether the trial is still undecided; a second opener may belong to its call."""
        if self._is_thought or taken.marker is None or taken.marker == "end":
            return not self._is_thought and taken.marker is None
        if trial.feed(taken.written):
            return False
        self._kept.append(taken.written)
        return True

    def _end_by_call(self) -> None:
        self._state = "after"
        self.ended_by_call = True

    def _think(self, events: list[Event], text: str) -> None:
        if emitted := self._newlines.take(text):
            events.append(Reasoning(emitted))
