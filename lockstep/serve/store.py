"""Responses that clients may ask for again, in memory, bounded in number, bytes and age."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import Any

from pydantic import BaseModel

PART = 8
"""Bytes that count for a value beside its text: quotes, commas and the like."""
WIDE = 4
"""Bytes of a character of a text that is not all ASCII, at most."""


@dataclass(frozen=True)
class Stored:
    """A response as sent, and the conversation up to its end; weighed: the weights of both.

    recording: events of a response that was made in the background; part of the first weight.
    """

    response: dict[str, Any]
    items: tuple[Any, ...]
    weighed: tuple[int, int]
    recording: Any = None

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
    """The latest responses by id, bounded in number, in bytes and in seconds since the last use.

    The one that was asked for longest ago goes first.
    """

    def __init__(self, most: int, most_bytes: int, max_age: float = inf) -> None:
        self.most = most
        self.max_age = max_age
        self._used: dict[str, float] = {}
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
        self._used[response_id] = time.monotonic()
        self.size += stored.size
        while len(self._kept) > self.most or self.size > self.most_bytes:
            self.remove(next(iter(self._kept)))
        self._remove_old()

    def get(self, response_id: str) -> Stored | None:
        """Return a response; None if it is not kept, or is no more."""
        self._remove_old()
        found = self._kept.get(response_id)
        if found is not None:
            self._kept.move_to_end(response_id)
            self._used[response_id] = time.monotonic()
        return found

    def _remove_old(self) -> None:
        """Forget the responses that nobody asked for since max_age seconds."""
        oldest = time.monotonic() - self.max_age
        while self._kept and self._used[next(iter(self._kept))] < oldest:
            self.remove(next(iter(self._kept)))

    def remove(self, response_id: str) -> bool:
        """Forgets a response; whether it was kept."""
        found = self._kept.pop(response_id, None)
        self._used.pop(response_id, None)
        self.size -= found.size if found else 0
        return found is not None
