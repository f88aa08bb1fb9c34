"""Events as blocks of one kind, which open, grow and close: reasoning, text, and tool calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.text.parsers.events import AnswerEvent, CallEnd, CallStart, Content, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer. text: what it holds so far; a call's arguments. name, id: a call's.

    complete: whether a call has ended; others were cut, or broke their grammar. logprobs: of the
    tokens of a text, where they are asked for.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    id: str | None = None
    number: int = 0
    complete: bool = False
    logprobs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """What happened to block `index`; text: by what it grew."""

    what: Literal["open", "grow", "close"]
    index: int
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one completion, in order. At most one is open, the last."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open = False
        self._pieces: list[str] = []

    def push(self, events: Iterable[AnswerEvent]) -> Iterator[Change]:
        """The changes that events make."""
        for event in events:
            match event:
                case CallStart(number, name, call_id):
                    yield from self._begin(Block("call", name=name, id=call_id, number=number))
                case Content(text):
                    yield from self._grow("text", text)
                case Reasoning(text):
                    yield from self._grow("reasoning", text)
                case CallEnd():
                    self.blocks[-1].complete = True
                    yield from self.close()
                case _:
                    yield from self._grow("call", event.text)

    def close(self) -> Iterator[Change]:
        """Closes the open block; none is open afterwards."""
        if self._open:
            self._open = False
            block = self.blocks[-1]
            block.text = "".join(self._pieces)
            yield Change("close", len(self.blocks) - 1, block)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.close()
        self.blocks.append(block)
        self._pieces = []
        self._open = True
        yield Change("open", len(self.blocks) - 1, block)

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not self._open or self.blocks[-1].kind != kind:
            yield from self._begin(Block(kind))
        self._pieces.append(text)
        yield Change("grow", len(self.blocks) - 1, self.blocks[-1], text)
