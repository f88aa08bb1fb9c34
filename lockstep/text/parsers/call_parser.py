"""Base of all grammars of tool calls: content outside of calls, states inside, and faults.

A parser also declares how calls are written. grammars/tool_calls.py makes grammars from that, so
that a grammar allows exactly what the parser reads as these calls.

A state has a reader (a Scan over its markers, or one of JSON) and a method `_in_STATE` that takes
what the reader settled. Text of a call that breaks its grammar comes back as content, with an
event that says why.
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
    """Takes text in pieces: a Scan, or a reader of JSON."""

    def take(self, text: str, start: int = 0) -> Taken:
        """Return the settled part of text[start:], the marker that ended it, and the next index."""
        ...

    def flush(self) -> str:
        """Return the pending text after the last text."""
        ...


class CallParser(ABC):
    """A grammar of calls. Subclasses give markers, states, and what may stand where.

    SIGNS: strings that all stand in a template of this grammar. OPENERS: what begins a call outside
    of one, by the marker's name. OVER: what ends a call that broke its grammar. ENDS_REASONING:
    openers that end reasoning too. MARKERS: of states that look for some. FIRST: the first state.
    AFTER: the one behind a complete call, where only characters of FILLER may stand.

    How calls are written: AROUND: what stands in front of all calls of an answer, and behind them.
    TAGS: around each of them. BETWEEN: between two. BARE: what begins a call at an answer's
    beginning without an opener. PLAIN_VALUES: whether texts among the arguments have
    no quotes and escapes. JSON_CALLS: whether all quotes in a call are those of JSON.
    """

    SIGNS: ClassVar[tuple[str, ...]] = ()
    OPENERS: ClassVar[Mapping[str, str]] = {}
    OVER: ClassVar[Mapping[str, str]] = {}
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
    """States whose text is content; that of others is kept, in case that it comes to nothing."""

    def __init__(self, tools: Any) -> None:
        self._events: list[Event] = []
        self._blank = Tail()  # whitespace around calls belongs to the grammar
        self._raw: list[str] = []  # all text since the call began
        self._index = -1
        self._open = False  # a CallStart was emitted, and its arguments go on
        self._brace = ""  # the arguments' last brace, held back until the call is complete
        self._unclosed = False  # arguments are complete, the call's closing tag has not come
        self._tools = tools
        self._written = ""  # the last marker as it came
        self._state = ""
        self._reader: Reader
        self._enter(self.FIRST)

    @classmethod
    def texts(cls) -> set[str]:
        """The markers as they are written: tokens that must be seen, though they may be special."""
        found: set[str] = {*cls.OPENERS.values(), *cls.OVER.values()}
        return found.union(*(markers.names for markers in cls.MARKERS.values()))

    @classmethod
    @abstractmethod
    def head(cls, name: str) -> str:
        """Return the text of a call before its arguments."""

    @classmethod
    @abstractmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """A call of a tool, without what stands around it, as one expression of a grammar.

        Raises RequestError for what would not be obeyed.
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
        """Names of the tools that were sent."""
        return parameters_by_name(self._tools).keys()

    def new(self) -> "CallParser":
        """Return a parser of the same tools that has read nothing."""
        return type(self)(self._tools)

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        self._run(text)
        return self._told()

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the events that were held back, once no more text comes.

        A call that lacks only its closing tag counts where the model ended the text itself, or
        where the stop string holds that tag. It never counts where the text was cut.
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
        return self._told()

    def _stop_closes(self, stop: str) -> bool:
        """Emit the end of the call if the stop string completes it; return whether it does."""
        if not stop or not (self._open or self._unclosed):
            return False
        # On a copy, since the stop string is no part of the text. The tools are shared with it.
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
        """End a call that was cut. Its arguments were sent as far as they came."""
        self._events.append(CallError(CUT))
        self._abandon()
        self._enter("content")

    def _finish(self, why: str) -> None:
        """End a text that ends inside of the grammar. why: what CallError says."""
        held = self._reader.flush()
        kept = "".join(self._raw).removesuffix(held)
        if self._state == self.AFTER and not kept.strip(self.FILLER):
            self._enter("content")
            self._content(held)
        else:
            self._fail(why)

    def _run(self, text: str) -> None:
        place = 0
        while place < len(text):
            state = self._state
            found = self._reader.take(text, place)
            end = found.end
            self._written = found.written
            if self._unclosed and (found.marker or found.text.strip(self.FILLER)):
                self._complete()
            if state not in self.OUTSIDE:
                self._raw.append(text[place:end])
            getattr(self, f"_in_{state}")(found.text, found.marker)
            place = end

    def _told(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _enter(self, state: str, reader: Reader | None = None) -> None:
        """The state that takes the text from here on; without a reader it looks for its markers."""
        self._state = state
        self._reader = Scan(self.MARKERS[state]) if reader is None else reader

    def _in_content(self, text: str, marker: str | None) -> None:
        self._content(text)
        if marker is not None:
            self._begin(marker)

    def _in_broken(self, text: str, marker: str | None) -> None:
        """Take the rest of a call that broke its grammar as content."""
        self._content(text)
        if marker is None:
            return
        if marker in self.OVER:
            self._content(self.OVER[marker])
            self._enter("content")
        else:
            self._begin(marker)

    def _begin(self, marker: str) -> None:
        """An opener came."""
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
        """Chooses the state behind a call's beginning without an opener; most have none."""
        self._enter("content")

    def _spelling(self, marker: str) -> str:
        """A marker of this state, as it is written."""
        return next(s for s, m in self.MARKERS[self._state].names.items() if m == marker)

    def _content(self, text: str) -> None:
        if shown := self._blank.take(text):
            self._events.append(Content(shown))

    def _call(self, name: str, call_id: str | None = None) -> None:
        """A call begins. Blanks in front of it are the grammar's."""
        self._index += 1
        self._open = True
        self._blank.flush()
        self._events.append(CallStart(self._index, name, call_id))

    def _arguments(self, text: str) -> None:
        """Emit arguments, all but a last brace: without it no beginning of them is JSON."""
        if not text or not self._open:
            return
        text = self._brace + text
        self._brace = "}" if text.endswith("}") else ""
        if shown := text.removesuffix("}"):
            self._events.append(CallArguments(self._index, shown))

    def _closed(self) -> None:
        """Arguments are complete. The call is, too, once its closing tag or other text comes."""
        self._open = False
        self._unclosed = True
        self._raw.clear()
        if not self.OVER:
            self._complete()

    def _complete(self) -> None:
        """Emit the end of a call whose arguments are complete."""
        if self._unclosed:
            self._events += [CallArguments(self._index, self._brace)] if self._brace else []
            self._events.append(CallEnd(self._index))
        self._unclosed = False
        self._brace = ""

    def _abandon(self) -> None:
        """Forget the call that was being read. What was emitted of it stays incomplete."""
        self._open = False
        self._unclosed = False
        self._brace = ""
        self._raw.clear()

    def _fail(self, why: str, text: str = "", marker: str | None = None) -> None:
        """The call breaks its grammar, with this text and marker, where they are named."""
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
    """Reads an answer that is calls, or text that begins as no opener does and holds none."""

    def __init__(self, calls: CallParser) -> None:
        self._calls = calls
        self._openings = {opener[0] for opener in calls.OPENERS.values()}
        self._begun = False
        self._is_text = False

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        if self._is_text:
            return [Content(text)]
        shown = text.lstrip()
        if self._begun or not shown:
            return self._calls.feed(text)
        self._begun = True
        self._is_text = shown[0] not in self._openings
        return [*self._calls.finish(), Content(text)] if self._is_text else self._calls.feed(text)

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        return [] if self._is_text else self._calls.finish(end)
