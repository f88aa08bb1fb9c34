"""Base class of tool-call parsers: a state machine over markers, with fault handling.

A parser also declares how calls are written. grammars/tool_calls.py makes grammars from that, so
that a grammar allows exactly what the parser reads as these calls.

Each state has a reader (a Scan of its markers, or a JSON reader) and a method `_in_STATE` that
takes what the reader returned. The text of a malformed call is emitted as content, with an event
that says why.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol

from lockstep.text.grammars.lark import Rules, Tool
from lockstep.text.parsers.events import (
    NATURAL_END,
    CallArguments,
    CallEnd,
    CallError,
    CallStart,
    Content,
    Event,
    TextEnd,
)
from lockstep.text.parsers.schema import parameters_by_name
from lockstep.text.scan import Markers, Scan, Tail, Taken

ENDED = "the text ended inside of a call"
CUT = "the text was cut inside of a call"


class Reader(Protocol):
    """Incremental reader: a Scan or a JSON reader."""

    def take(self, text: str, start: int = 0) -> Taken:
        """Return the final part of text[start:], the marker that ended it, and the next index."""
        ...

    def flush(self) -> str:
        """Return the pending text after the last text."""
        ...


class CallParser(ABC):
    """Base of tool-call parsers. Subclasses define markers, states and the syntax of calls.

    SIGNS: strings that identify the syntax in a chat template; all must occur.
    OPENERS: markers that begin a call, by name.
    CLOSERS: markers that end a malformed call.
    ENDS_REASONING: openers that also end reasoning.
    MARKERS: markers of each state that searches for some.
    FIRST: initial state.
    AFTER: state after a complete call, in which only characters of FILLER may occur.

    AROUND: text before and after all calls of an answer.
    TAGS: text before and after each call.
    BETWEEN: text between two calls.
    BARE: text that begins a call at the start of an answer, without an opener.
    PLAIN_VALUES: string arguments are written without quotes and escapes.
    JSON_CALLS: all quotes in a call are those of JSON.
    """

    SIGNS: ClassVar[tuple[str, ...]] = ()
    OPENERS: ClassVar[Mapping[str, str]] = {}
    CLOSERS: ClassVar[Mapping[str, str]] = {}
    ENDS_REASONING: ClassVar[tuple[str, ...]] = ()
    MARKERS: ClassVar[Mapping[str, Markers]] = {}
    PLAIN_VALUES: ClassVar[bool] = False
    JSON_CALLS: ClassVar[bool] = False
    FIRST: ClassVar[str] = "content"
    AFTER: ClassVar[str] = ""
    FILLER: ClassVar[str] = " \t\r\n"
    AROUND: ClassVar[tuple[str, str]] = ("", "")
    TAGS: ClassVar[tuple[str, str]] = ("", "")
    BETWEEN: ClassVar[str] = "\n"
    BARE: ClassVar[str] = ""
    OUTSIDE: ClassVar[tuple[str, ...]] = ("content", "broken")
    """States whose text is content. The text of other states is kept in case the call is
    malformed."""

    def __init__(self, tools: Any) -> None:
        self._events: list[Event] = []
        self._blank = Tail()  # whitespace around calls belongs to their syntax
        self._raw: list[str] = []  # all text since the call began
        self._index = -1
        self._open = False  # a CallStart was emitted, and its arguments are incomplete
        self._brace = ""  # final brace of the arguments, delayed until the call is complete
        self._unclosed = False  # the arguments are complete, but the closing tag is missing
        self._tools = tools
        self._written = ""  # the last marker as spelled in the text
        self._state = ""
        self._reader: Reader
        self._enter(self.FIRST)

    @classmethod
    def texts(cls) -> set[str]:
        """Return the markers as written: tokens that must be shown even if they are special."""
        fixed: set[str] = {*cls.OPENERS.values(), *cls.CLOSERS.values()}
        return fixed.union(*(markers.names for markers in cls.MARKERS.values()))

    @classmethod
    @abstractmethod
    def head(cls, name: str) -> str:
        """Return the text of a call before its arguments."""

    @classmethod
    @abstractmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return the Lark expression of a call of a tool, without the surrounding tags.

        Raises: RequestError for a schema that is not enforced.
        """

    @classmethod
    def reads(cls, name: str) -> bool:
        """Return whether the parser reads a written call of this name as that call."""
        try:
            name.encode()
        except UnicodeEncodeError:
            return False
        written = f"{cls.AROUND[0]}{cls.TAGS[0]}{cls.head(name)}{{}}"
        events = cls([]).feed(written)
        return [event.name for event in events if isinstance(event, CallStart)] == [name]

    @cached_property
    def tool_names(self) -> Collection[str]:
        """Return the names of the tools that were sent."""
        return parameters_by_name(self._tools).keys()

    def new(self) -> "CallParser":
        """Return a parser of the same tools that has read nothing."""
        return type(self)(self._tools)

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return the events that became certain."""
        self._run(text)
        return self._take_events()

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text.

        A call that only lacks its closing tag is complete if the model ended the text itself, or if
        the stop string contains that tag. It is never complete if the text was cut off.
        """
        if end.cut and not self._stop_closes(end.stop) and (self._open or self._unclosed):
            self._cut()
        if not end.cut:
            self._complete()
        if self._state not in self.OUTSIDE:
            self._finish(CUT if end.cut else ENDED)
        self._content(self._reader.flush())
        blank = self._blank.flush()
        if blank and self._index < 0:
            self._events.append(Content(blank))
        return self._take_events()

    def _stop_closes(self, stop: str) -> bool:
        """Emit the end of the call if the stop string completes it; return whether it does."""
        if not stop or not (self._open or self._unclosed):
            return False
        # On a copy, since the stop string is not part of the text. The copy shares the tools.
        trial = copy.deepcopy(self, {id(self._tools): self._tools})
        trial._events.clear()
        trial._run(stop)
        if trial._open or trial._unclosed or any(isinstance(e, CallError) for e in trial._events):
            return False
        self._events += [e for e in trial._events if isinstance(e, CallArguments | CallEnd)]
        self._abandon()
        self._enter("content")
        return True

    def _cut(self) -> None:
        """End a call that was cut off. Its arguments have been emitted as far as they were
        generated."""
        self._events.append(CallError(CUT))
        self._abandon()
        self._enter("content")

    def _finish(self, why: str) -> None:
        """End a text that ends inside of a call. why: message of the CallError."""
        pending = self._reader.flush()
        kept = "".join(self._raw).removesuffix(pending)
        if self._state == self.AFTER and not kept.strip(self.FILLER):
            self._enter("content")
            self._content(pending)
        else:
            self._fail(why)

    def _run(self, text: str) -> None:
        index = 0
        while index < len(text):
            state = self._state
            taken = self._reader.take(text, index)
            end = taken.end
            self._written = taken.written
            if self._unclosed and (taken.marker or taken.text.strip(self.FILLER)):
                self._complete()
            if state not in self.OUTSIDE:
                self._raw.append(text[index:end])
            getattr(self, f"_in_{state}")(taken.text, taken.marker)
            index = end

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _enter(self, state: str, reader: Reader | None = None) -> None:
        """Enter a state; without a reader it searches for the state's markers."""
        self._state = state
        self._reader = Scan(self.MARKERS[state]) if reader is None else reader

    def _in_content(self, text: str, marker: str | None) -> None:
        self._content(text)
        if marker is not None:
            self._begin(marker)

    def _in_broken(self, text: str, marker: str | None) -> None:
        """Emit the rest of a malformed call as content."""
        self._content(text)
        if marker is None:
            return
        if marker in self.CLOSERS:
            self._content(self.CLOSERS[marker])
            self._enter("content")
        else:
            self._begin(marker)

    def _begin(self, marker: str) -> None:
        """Begin a call at an opener."""
        self._raw = [self.OPENERS[marker]]
        self._opened(marker)

    @abstractmethod
    def _opened(self, marker: str) -> None:
        """Choose the state after an opener."""

    def _in_start(self, text: str, marker: str | None) -> None:
        """FIRST where a call may begin an answer without an opener: nothing but blanks has come."""
        self._content(text)
        if marker is not None and marker in self.OPENERS:
            self._begin(marker)
        elif text.strip():
            self._release("content", "", marker)
        elif marker is not None:
            self._raw = [self._spelling(marker)]
            self._bare()

    def _bare(self) -> None:
        """Enter the state after a call's beginning without an opener. Most parsers have no such
        calls."""
        self._enter("content")

    def _spelling(self, marker: str) -> str:
        """Return a marker of this state as it is written."""
        return next(s for s, m in self.MARKERS[self._state].names.items() if m == marker)

    def _content(self, text: str) -> None:
        if shown := self._blank.take(text):
            self._events.append(Content(shown))

    def _call(self, name: str, call_id: str | None = None) -> None:
        """Emit the start of a call. Preceding whitespace belongs to the call syntax."""
        self._index += 1
        self._open = True
        self._blank.flush()
        self._events.append(CallStart(self._index, name, call_id))

    def _arguments(self, text: str) -> None:
        """Emit arguments, except a final brace: no proper prefix of them is valid JSON."""
        if not text or not self._open:
            return
        text = self._brace + text
        self._brace = "}" if text.endswith("}") else ""
        if emitted := text.removesuffix("}"):
            self._events.append(CallArguments(self._index, emitted))

    def _closed(self) -> None:
        """Mark the arguments as complete. The call is complete at its closing tag or at other
        text."""
        self._open = False
        self._unclosed = True
        self._raw.clear()
        if not self.CLOSERS:
            self._complete()

    def _complete(self) -> None:
        """Emit the end of a call whose arguments are complete."""
        if self._unclosed:
            self._events += [CallArguments(self._index, self._brace)] if self._brace else []
            self._events.append(CallEnd(self._index))
        self._unclosed = False
        self._brace = ""

    def _abandon(self) -> None:
        """Drop the current call. What was emitted of it stays incomplete."""
        self._open = False
        self._unclosed = False
        self._brace = ""
        self._raw.clear()

    def _fail(self, why: str, text: str = "", marker: str | None = None) -> None:
        """Report a malformed call; the given text and marker are read again as content."""
        self._events.append(CallError(why))
        self._release("broken", text, marker)

    def _release(self, state: str, text: str = "", marker: str | None = None) -> None:
        """Emit the kept text as content, and read this text and marker again in another state."""
        if marker is None:
            text += self._reader.flush()
        else:
            text += self._spelling(marker)
        kept = "".join(self._raw).removesuffix(text)
        self._abandon()
        self._enter(state)
        self._content(kept)
        self._run(text)


class CallsOrForm:
    """Parser of an answer that is either calls or JSON, decided by its first character."""

    def __init__(self, calls: CallParser) -> None:
        self._calls = calls
        self._openings = {opener[0] for opener in calls.OPENERS.values()}
        self._decided = False
        self._is_text = False

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return the events that became certain."""
        if self._is_text:
            return [Content(text)]
        stripped = text.lstrip()
        if self._decided or not stripped:
            return self._calls.feed(text)
        self._decided = True
        self._is_text = stripped[0] not in self._openings
        return [*self._calls.finish(), Content(text)] if self._is_text else self._calls.feed(text)

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        return [] if self._is_text else self._calls.finish(end)
