"""A completion as a sequence of blocks that open, grow and close: reasoning, text, tool calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.text.parsers.events import AnswerEvent, CallEnd, CallStart, Content, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass
class ContentBlock:
    """A block of a response.

    text: content so far; of a call, its arguments.
    name, id, number: tool name, the model's id and the index of a call.
    is_complete: True for a call that has ended; a call may be cut, or break its grammar.
    logprobs: log-probabilities of the tokens of a text, where the request asks for them.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    id: str | None = None
    number: int = 0
    is_complete: bool = False
    logprobs: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class BlockChange:
    """Change of the block with this index. text: text that a growing block gets."""

    action: Literal["open", "grow", "close"]
    index: int
    block: ContentBlock
    text: str = ""


class ContentBlocks:
    """The blocks of one completion, in order. Only the last one can be open."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._is_open = False
        self._texts: list[str] = []

    def push(self, events: Iterable[AnswerEvent]) -> Iterator[BlockChange]:
        """Apply events of the parsers and yield the changes that they make."""
        for event in events:
            match event:
                case CallStart(number, name, call_id):
                    yield from self._open(
                        ContentBlock("call", name=name, id=call_id, number=number)
                    )
                case Content(text):
                    yield from self._grow("text", text)
                case Reasoning(text):
                    yield from self._grow("reasoning", text)
                case CallEnd():
                    self.blocks[-1].is_complete = True
                    yield from self.close()
                case _:
                    yield from self._grow("call", event.text)

    def close(self) -> Iterator[BlockChange]:
        """Close the open block, if any."""
        if self._is_open:
            self._is_open = False
            block = self.blocks[-1]
            block.text = "".join(self._texts)
            yield BlockChange("close", len(self.blocks) - 1, block)

    def _open(self, block: ContentBlock) -> Iterator[BlockChange]:
        yield from self.close()
        self.blocks.append(block)
        self._texts = []
        self._is_open = True
        yield BlockChange("open", len(self.blocks) - 1, block)

    def _grow(self, kind: Kind, text: str) -> Iterator[BlockChange]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(ContentBlock(kind))
        # Texts are joined once, at the end: adding to a string would copy it for every token.
        self._texts.append(text)
        yield BlockChange("grow", len(self.blocks) - 1, self.blocks[-1], text)
