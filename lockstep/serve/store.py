"""Responses that clients may ask for again, in memory, bounded in number and in bytes."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

PART = 8
"""Bytes that count for a value beside its text: quotes, commas and the like."""
WIDE = 4
"""Bytes of a character of a text that is not all ASCII, at most."""


@dataclass(frozen=True)
class Stored:
    """A response as sent, and the conversation up to its end; weighed: the weights of both."""

    response: dict[str, Any]
    items: tuple[Any, ...]
    weighed: tuple[int, int]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the response was made from."""
        return self.items[: len(self.items) - len(self.response["output"])]

    @property
    def size(self) -> int:
        """What it counts for in the store, in bytes."""
        return sum(self.weighed)


def weight(value: Any) -> int:
    """About the bytes of a value as JSON, models among it; seldom less.

    A text counts by its length alone, so that it costs no more to weigh long ones.
    """
    found = 0
    waiting = [value]
    while waiting:
        part = waiting.pop()
        found += PART
        if isinstance(part, str):
            found += len(part) * (1 if part.isascii() else WIDE)
        elif isinstance(part, (list, tuple)):
            waiting += part
        elif isinstance(part, dict):
            waiting += part
            waiting += part.values()
        elif isinstance(part, BaseModel):
            found += PART * len(part.__dict__)
            waiting += [one for one in part.__dict__.values() if one is not None]
            waiting += [part.__pydantic_extra__] if part.__pydantic_extra__ else []
    return found


class ResponseStore:
    """The latest responses by id. The one that was asked for longest ago goes first."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.size = 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keeps a response, if it fits at all; others make room."""
        if stored.size > self.most_bytes or self.most < 1:
            return
        self.remove(response_id)
        self._kept[response_id] = stored
        self.size += stored.size
        while len(self._kept) > self.most or self.size > self.most_bytes:
            self.remove(next(iter(self._kept)))

    def get(self, response_id: str) -> Stored | None:
        """A response; None if it is not kept, or is no more."""
        found = self._kept.get(response_id)
        if found is not None:
            self._kept.move_to_end(response_id)
        return found

    def remove(self, response_id: str) -> bool:
        """Forgets a response; whether it was kept."""
        found = self._kept.pop(response_id, None)
        self.size -= found.size if found else 0
        return found is not None
