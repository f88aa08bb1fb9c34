"""What an answer must match, as the engine sees it: tokens in, bits of allowed tokens out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Lanes:
    """Threads that may share the masks of one answer. count: how many; map: as the built-in one,
    but that they run side by side."""

    count: int = 1
    map: Callable[..., Iterable[Any]] = map


ONE_LANE = Lanes()


class Grammar(Protocol):
    """Follows the answer of one request.

    accepted: tokens of the answer that it has taken. fault: why it allows no token any more, to be
    told to whoever asked; None where all is well. recipe: plain data of which whoever made the
    grammar makes it anew, in another process too.
    """

    @property
    def accepted(self) -> int: ...

    @property
    def fault(self) -> str | None: ...

    @property
    def recipe(self) -> Any: ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        ...

    def masks(self, drafts: Sequence[int], lanes: Lanes = ONE_LANE) -> list[bytes]:
        """The tokens that may come behind the answer so far, then behind each of the drafts, up to
        the first draft that may not come itself.

        Each mask holds a bit for every token of the model, lowest first, in whole words of 32 bits.
        Nothing of the drafts is kept.
        """
        ...
