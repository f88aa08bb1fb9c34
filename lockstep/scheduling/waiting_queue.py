"""Queue of the requests that wait for a row, ordered by priority and arrival."""

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

Key = tuple[int, int]
"""Priority (0 under fcfs) and arrival number, unique among requests; the smallest runs first."""


class Keyed(Protocol):
    """Entry of the queue. Its key never changes."""

    key: Key


EntryT = TypeVar("EntryT", bound=Keyed)

MIN_STALE_KEYS = 64
"""Removed keys that the heap may always contain, so that a short queue is not rebuilt often."""


class WaitingQueue(Generic[EntryT]):
    """Priority queue whose push, head and remove take O(log n) time, amortized.

    The heap contains keys only. The key of a removed entry stays in it until it reaches the top,
    or until removed keys outnumber the rest. A key is valid if `_entries` has it.
    """

    def __init__(self) -> None:
        self._heap: list[Key] = []
        self._entries: dict[Key, EntryT] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        """Iterate in the order of service; sorts a copy, so not for use in a step."""
        return iter([self._entries[key] for key in sorted(self._entries)])

    def push(self, entry: EntryT) -> None:
        """Add an entry, which must not be in the queue."""
        assert entry.key not in self._entries, f"two entries have the key {entry.key}"
        self._entries[entry.key] = entry
        heapq.heappush(self._heap, entry.key)

    def head(self) -> EntryT | None:
        """Return the entry to be served next, None if the queue is empty."""
        while self._heap and self._heap[0] not in self._entries:
            heapq.heappop(self._heap)
        return self._entries[self._heap[0]] if self._heap else None

    def remove(self, entry: EntryT) -> None:
        """Remove an entry, wherever it is in the order. KeyError if it is not in the queue."""
        del self._entries[entry.key]
        stale = len(self._heap) - len(self._entries)
        if stale > max(len(self._entries), MIN_STALE_KEYS):
            self._heap = sorted(self._entries)  # a sorted list is a heap
