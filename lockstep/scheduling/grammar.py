"""Grammars that constrain answers: they accept tokens and write bitmasks of allowed tokens.

Grammars stay in the process of the scheduler. A worker sends a `MaskQuery` per row, by request id,
and gets bitmasks back.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

GrammarT = TypeVar("GrammarT", covariant=True)
"""Type of the grammars whose masks one call of `fill` writes."""


@dataclass(frozen=True)
class GrammarMasks(Generic[GrammarT]):
    """Bitmasks of one grammar that `fill` writes: one for the next token, one after each draft.

    first: index of the first bitmask among those of a forward pass; the others follow it.
    """

    grammar: GrammarT
    drafts: Sequence[int]
    first: int


Fill = Callable[[Sequence[GrammarMasks[Any]], memoryview], None]
"""Function that writes the bitmasks of many answers to memory [masks of a forward pass,
words].

All grammars of one call share this `fill`. A bitmask has one bit per token of the model, lowest
first, in words of 32 bits. Masks after a draft that the grammar forbids are undefined. The grammars
do not keep the drafts.
"""


class Grammar(Protocol):
    """State of the grammar of one request.

    accepted: number of answer tokens that the grammar has accepted. fault: why the grammar allows
    no token any more, for the client; None as long as it does. recipe: plain data from which
    another process makes the same grammar. fill: writes the masks of all grammars that share it.
    is_free: from here on every continuation is allowed; such a grammar gets no more tokens and
    needs no masks.
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
        """Accept the next tokens of the answer."""
        ...

    def fresh(self) -> "Grammar":
        """Return a grammar of the same recipe that has accepted no token."""
        ...


@dataclass(frozen=True)
class MaskQuery:
    """Request of a worker for the bitmasks of one row.

    new_tokens: answer tokens that the grammar has not accepted yet. drafts: draft tokens that the
    step verifies. first: index of the row's first bitmask among those of the forward pass.
    """

    request_id: str
    new_tokens: Sequence[int]
    drafts: Sequence[int]
    first: int


FillMasks = Callable[[Sequence[MaskQuery], memoryview], frozenset[str]]
"""Function that answers the mask queries of a step into memory [masks of a forward pass,
words].

Returns the ids of requests whose grammars are free by now: their masks are not written.
"""


def fill_masks(
    grammar_of: Callable[[str], Grammar], queries: Sequence[MaskQuery], memory: memoryview
) -> frozenset[str]:
    """Answer mask queries, see `FillMasks`. grammar_of: looks a grammar up by request id."""
    masks: dict[Fill, list[GrammarMasks[Grammar]]] = {}
    free = set()
    for query in queries:
        grammar = grammar_of(query.request_id)
        grammar.accept(query.new_tokens)
        if grammar.is_free:
            free.add(query.request_id)
            continue
        of_grammar = GrammarMasks(grammar, query.drafts, query.first)
        masks.setdefault(grammar.fill, []).append(of_grammar)
    # One call for all grammars of a kind: the compiler fills them in parallel.
    for fill, masks_of_kind in masks.items():
        fill(masks_of_kind, memory)
    return frozenset(free)
