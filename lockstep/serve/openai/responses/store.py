"""Storage of responses in memory, limited in number, bytes and age."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from lockstep.serve.openai.responses.call_items import InputItem
from lockstep.serve.openai.responses.schema import ResponseObject

if TYPE_CHECKING:
    from lockstep.serve.requests.event_log import EventLog

VALUE_BYTES = 8
"""Bytes of a value besides its text: quotes, commas and the like."""
MAX_CHARACTER_BYTES = 4
"""Maximum bytes of a character of a text that is not ASCII."""


@dataclass(frozen=True)
class StoredResponse:
    """A response as it was sent, and its conversation.

    inputs: items that it was generated from, with those of earlier turns.
    outputs: an item for each item of its output; None for an incomplete call, which later turns
        do not see.
    response_bytes, conversation_bytes: approximate sizes.
    items_by_id: items of the conversation's responses by the ids that clients know.
    event_log: events of a response that was generated in the background, counted in
        response_bytes.
    owner: see ResumableStreams.owner().
    """

    response: ResponseObject | None = None
    inputs: tuple[InputItem, ...] = ()
    outputs: tuple[InputItem | None, ...] = ()
    response_bytes: int = 0
    conversation_bytes: int = 0
    items_by_id: dict[str, InputItem] = field(default_factory=dict)
    event_log: "EventLog | None" = None
    owner: str = ""

    @property
    def items(self) -> tuple[InputItem, ...]:
        """The conversation up to the end of the response."""
        return (*self.inputs, *(item for item in self.outputs if item is not None))

    @property
    def size(self) -> int:
        """Approximate bytes that the response counts for in the store."""
        return self.response_bytes + self.conversation_bytes


def json_bytes(value: Any) -> int:
    """Return the approximate bytes of a value as JSON, with models among it; seldom less.

    The length of a text is enough, so that long texts cost no more time.
    """
    size = 0
    pending = [value]
    while pending:
        part = pending.pop()
        size += VALUE_BYTES
        if isinstance(part, str):
            size += len(part) * (1 if part.isascii() else MAX_CHARACTER_BYTES)
        elif isinstance(part, (list, tuple)):
            pending += part
        elif isinstance(part, dict):
            pending += part
            pending += part.values()
        elif isinstance(part, BaseModel):
            size += VALUE_BYTES * len(part.__dict__)
            pending += [entry for entry in part.__dict__.values() if entry is not None]
            pending += [part.__pydantic_extra__] if part.__pydantic_extra__ else []
    return size


@dataclass
class _Entry:
    """A stored response, and the time.monotonic() of its last use."""

    stored: StoredResponse
    last_use: float


class ResponseStore:
    """LRU cache of responses by id.

    max_age: seconds since the last use after which a response is removed.
    """

    def __init__(self, max_responses: int, max_bytes: int, max_age: float = inf) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.size = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Store a response, unless it is larger than the store, and evict others for it."""
        if stored.size > self.max_bytes or self.max_responses < 1:
            return
        self.remove(response_id)
        self._entries[response_id] = _Entry(stored, time.monotonic())
        self.size += stored.size
        while len(self._entries) > self.max_responses or self.size > self.max_bytes:
            self.remove(next(iter(self._entries)))
        self._remove_expired()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response and mark it as used; None if it is not stored."""
        self._remove_expired()
        entry = self._entries.get(response_id)
        if entry is None:
            return None
        self._entries.move_to_end(response_id)
        entry.last_use = time.monotonic()
        return entry.stored

    def _remove_expired(self) -> None:
        # Entries are ordered by their last use.
        oldest = time.monotonic() - self.max_age
        while self._entries and next(iter(self._entries.values())).last_use < oldest:
            self.remove(next(iter(self._entries)))

    def remove(self, response_id: str) -> bool:
        """Remove a response and return whether it was stored."""
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return False
        self.size -= entry.stored.size
        return True
