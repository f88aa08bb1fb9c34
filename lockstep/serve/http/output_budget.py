"""What of answers is held for their readers: bounded for each, and for all together."""

from collections.abc import Hashable
from typing import Generic, TypeVar

PIECE_BYTES = 500
TOKEN_BYTES = 100
LOGPROB_BYTES = 250
"""About what each takes in memory, with the objects of Python that it is made of."""
Holder = TypeVar("Holder", bound=Hashable)


def weight(tokens: int, logprobs: int) -> int:
    """About the bytes of a piece of an answer; logprobs: those of its tokens and of the prompt."""
    return PIECE_BYTES + TOKEN_BYTES * tokens + LOGPROB_BYTES * logprobs


class Held(Generic[Holder]):
    """Bytes that holders hold. most: of one; most_of_all: of all of them."""

    def __init__(self, most: int, most_of_all: int) -> None:
        self.most = most
        self.most_of_all = most_of_all
        self.total = 0
        self._by_holder: dict[Holder, int] = {}

    def add(self, holder: Holder, size: int) -> Holder | None:
        """Counts what it takes on. Returns who has to give up: the holder itself, or whoever holds
        most where all together hold too much."""
        self.total += size
        self._by_holder[holder] = self._by_holder.get(holder, 0) + size
        if self._by_holder[holder] > self.most:
            return holder
        if self.total > self.most_of_all:
            return max(self._by_holder, key=self._by_holder.__getitem__)
        return None

    def take(self, holder: Holder, size: int) -> None:
        """Its reader has this."""
        if holder in self._by_holder:
            self.total -= size
            self._by_holder[holder] -= size

    def forget(self, holder: Holder) -> None:
        """It holds nothing any more."""
        self.total -= self._by_holder.pop(holder, 0)
