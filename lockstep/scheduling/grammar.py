"""What an answer must match, as the engine sees it: tokens in, bits of allowed tokens out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Kind = TypeVar("Kind", covariant=True)
"""Grammars that write their masks side by side."""


@dataclass(frozen=True)
class Wanted(Generic[Kind]):
    """Masks of one answer: behind its tokens so far, then behind each of the drafts.

    first: the place of the first among the masks of a step; the others follow it.
    """

    grammar: Kind
    drafts: Sequence[int]
    first: int


Fill = Callable[[Sequence[Wanted[Any]], memoryview], None]
"""Writes the masks of many answers, held to grammars that have this same Fill, to memory [masks of
a step, words].

A mask holds a bit for every token of the model, lowest first, in whole words of 32 bits. What is
written behind a draft that may not come itself is of no matter. Nothing of the drafts is kept.
"""


class Grammar(Protocol):
    """Follows the answer of one request.

    accepted: tokens of the answer that it has taken. fault: why it allows no token any more, to be
    told to whoever asked; None where all is well. recipe: plain data of which whoever made the
    grammar makes it anew, in another process too. fill: writes masks of all grammars that have the
    same one, side by side. is_free: whether every continuation of the answer is allowed from here
    on; such a grammar gets no further tokens, and no masks of it are made.
    """

    @property
    def accepted(self) -> int: ...

    @property
    def is_free(self) -> bool: ...

    @property
    def fault(self) -> str | None: ...

    @property
    def recipe(self) -> object: ...

    @property
    def fill(self) -> Fill: ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        ...
