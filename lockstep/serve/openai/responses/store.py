"""Responses that clients may ask for again, in memory, bounded in number, bytes and age."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import Any

from pydantic import BaseModel

PART = 8
"""Bytes that count for a value beside its text: quotes, commas and the like."""
WIDE = 4
"""Bytes of a character of a text that is not all ASCII, at most."""


@dataclass(frozen=True)
class Stored:
    """A response as sent, and its conversation.

    inputs: items that it was made from, those of earlier turns among them. outputs: an item for
    each of its output, None for a call that was cut, which no later turn sees. weighed: the weights
    of the response and of the conversation. named: items that answers of the conversation had, by
    the ids that clients know. recording: the Recording of a response that was made in
    the background, counted in the first weight; None for others.
    """

    response: dict[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    weighed: tuple[int, int]
    named: dict[str, Any] = field(default_factory=dict)
    recording: Any = None

    @property
    def items(self) -> tuple[Any, ...]:
        """The conversation up to the response's end."""
        return (*self.inputs, *(item for item in self.outputs if item is not None))

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


@dataclass
class _Entry:
    """A kept response, and when it was last used, by time.monotonic()."""

    stored: Stored
    used: float


class ResponseStore:
    """The latest responses by id, bounded in number, in bytes and in seconds since the last use.

    The one that was asked for longest ago goes first.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_age: float = inf) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.size = 0
        self._kept: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep a response if it fits at all, and remove others to make room."""
        if stored.size > self.max_bytes or self.max_responses < 1:
            return
        self.remove(response_id)
        self._kept[response_id] = _Entry(stored, time.monotonic())
        self.size += stored.size
        while len(self._kept) > self.max_responses or self.size > self.max_bytes:
            self.remove(next(iter(self._kept)))
        self._remove_old()

    def get(self, response_id: str) -> Stored | None:
        """Return a response; None if it is not kept, or is no more."""
        self._remove_old()
        entry = self._kept.get(response_id)
        if entry is None:
            return None
        self._kept.move_to_end(response_id)
        entry.used = time.monotonic()
        return entry.stored

    def _remove_old(self) -> None:
        """Remove responses that were last used more than max_age seconds ago."""
        oldest = time.monotonic() - self.max_age
        while self._kept and next(iter(self._kept.values())).used < oldest:
            self.remove(next(iter(self._kept)))

    def remove(self, response_id: str) -> bool:
        """Remove a response -> whether it was kept."""
        entry = self._kept.pop(response_id, None)
        if entry is None:
            return False
        self.size -= entry.stored.size
        return True
