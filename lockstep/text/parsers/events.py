"""Events that parsers make of a model's text, in the order in which it was written."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Protocol

from lockstep.outputs import ToolCall as ToolCall


@dataclass(frozen=True)
class Content:
    """Text meant for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; `index` counts the calls of one answer from 0. id: the model's own."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """A piece of call `index`'s arguments; the pieces, joined, are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """Call `index` is complete. A call without this event was cut, or broke its grammar: its
    arguments are then no JSON."""

    index: int


@dataclass(frozen=True)
class CallError:
    """A call broke its grammar, or the text was cut inside of it."""

    why: str


Told = Content | Reasoning | CallStart | CallArguments | CallEnd
"""Events that are parts of the answer."""
Event = Told | CallError


def call_id(request_id: str, completion: int, number: int, own: str | None) -> str:
    """Return the id of a tool call: the model's own, or one made of the call's place."""
    if own is not None:
        return own
    place = f"{request_id}/{completion}/{number}".encode()
    return f"call_{blake2b(place, digest_size=12).hexdigest()}"


def merged(events: list[Told]) -> list[Told]:
    """Join neighbours of one kind, and of one call, into one event."""
    if len(events) < 2:  # as it is with nearly every token
        return events
    found: list[Told] = []
    for event in events:
        match (found[-1] if found else None), event:
            case (Content(before), Content(text)):
                found[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(event)
    return found


@dataclass(frozen=True)
class TextEnd:
    """Why a text ended. cut: by something other than the model's end-of-text token. stop: text of
    the stop string or stop token that cut it, where the text itself does not hold it."""

    cut: bool = False
    stop: str = ""


NATURAL_END = TextEnd()
"""The model ended the text itself."""


class Parser(Protocol):
    """Text in pieces, events out. How the text was cut changes no joined result."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that more text settles."""
        ...

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        ...


class ReasoningParser(Parser, Protocol):
    """A parser that separates reasoning from the rest of a text. TAGS: its opening and closing
    tag."""

    TAGS: ClassVar[tuple[str, str]]

    @property
    def ended_by_call(self) -> bool:
        """Return whether a tool call ended reasoning, so that the closing tag may still come."""
        ...

    def use_calls(self, new_parser: "Callable[[], CallReader]") -> None:
        """Set the factory of parsers that decide whether a call opener begins a call."""
        ...

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends inside of reasoning."""
        ...

    @property
    def over(self) -> bool:
        """Return whether reasoning has ended."""
        ...


class CallReader(Parser, Protocol):
    """A parser of calls that knows the tools of the request."""

    @property
    def tool_names(self) -> Collection[str]:
        """Names of the tools that were sent."""
        ...


@dataclass
class Reply:
    """A parsed answer as a whole. errors: why calls were none, or broke off."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> "Reply":
        """Append the events; return the reply itself."""
        content = [self.content]
        reasoning = [self.reasoning]
        arguments: dict[int, list[str]] = {}
        for event in events:
            match event:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(_, name, call_id):
                    self.tool_calls.append(ToolCall(name, id=call_id, complete=False))
                case CallEnd(index):
                    self.tool_calls[index].complete = True
                case CallError(why):
                    self.errors.append(why)
                case CallArguments(index, text):
                    arguments.setdefault(index, []).append(text)
        self.content = "".join(content)
        self.reasoning = "".join(reasoning)
        for index, texts in arguments.items():
            self.tool_calls[index].arguments += "".join(texts)
        return self
