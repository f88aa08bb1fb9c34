"""Events that parsers make from a model's text, in the order of the text."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import ClassVar, Protocol

from lockstep.outputs import ToolCall as ToolCall


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """Start of a tool call; `index` counts the calls of one answer from 0. id: written by the
    model."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """Part of the arguments of call `index`; the parts join to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """Completion of call `index`. Without this event the call was cut off or malformed, and its
    arguments are not valid JSON."""

    index: int


@dataclass(frozen=True)
class CallError:
    """Malformed or cut-off call."""

    why: str


AnswerEvent = Content | Reasoning | CallStart | CallArguments | CallEnd
"""Events that are parts of the answer."""
Event = AnswerEvent | CallError


def call_id(
    request_id: str, completion: int, number: int, model_id: str | None, prefix: str = "call_"
) -> str:
    """Return the id of a tool call: the model's own, or a hash of the call's position.

    prefix: beginning of an id that is a hash, which differs between APIs.
    """
    if model_id is not None:
        return model_id
    position = f"{request_id}/{completion}/{number}".encode()
    return f"{prefix}{blake2b(position, digest_size=12).hexdigest()}"


def merge_adjacent(events: list[AnswerEvent]) -> list[AnswerEvent]:
    """Return the events with adjacent ones of the same kind and call joined."""
    if len(events) < 2:  # the case of nearly every token
        return events
    joined: list[AnswerEvent] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case (Content(before), Content(text)):
                joined[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                joined[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


@dataclass(frozen=True)
class TextEnd:
    """Reason why a text ended.

    cut: it was not ended by the model's end-of-text token.
    stop: stop string or text of the stop token that cut it, if the text itself does not contain it.
    """

    cut: bool = False
    stop: str = ""


NATURAL_END = TextEnd()
"""End by the model itself."""


class Parser(Protocol):
    """Incremental parser of text to events. How the text is cut does not change the joined
    result."""

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return the events that became certain."""
        ...

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        ...


class ReasoningParser(Parser, Protocol):
    """Parser that separates reasoning from the rest of a text. TAGS: its opening and closing
    tag."""

    TAGS: ClassVar[tuple[str, str]]

    @property
    def ended_by_call(self) -> bool:
        """Return whether a tool call ended the reasoning, so that the closing tag may follow
        later."""
        ...

    def use_calls(self, new_parser: "Callable[[], CallReader]") -> None:
        """Set the factory of parsers that decide whether a call opener begins a call."""
        ...

    @property
    def inside(self) -> bool:
        """Return whether the text so far ends inside of reasoning."""
        ...

    @property
    def ended(self) -> bool:
        """Return whether reasoning has ended."""
        ...


class CallReader(Parser, Protocol):
    """Parser of calls that knows the tools of the request."""

    @property
    def tool_names(self) -> Collection[str]:
        """Return the names of the tools that were sent."""
        ...


@dataclass
class Reply:
    """Parsed complete answer. errors: why calls were malformed."""

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
