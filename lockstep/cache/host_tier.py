"""Host tier of the cache: evicted pages and snapshots in host memory.

Each Pool of the device (lockstep.cache.pool) passes what it evicts to its HostStore. All stores of
a cache share the pages of one HostPool.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

Key = bytes
"""Key of cached content: a hash of everything that determines it."""
PAGES = "pages"
SLOTS = "slots"
"""Names of the pools, and of the units in them."""
Name = tuple[str, Key]
"""Name of an entry: its pool and its key there."""
DEVICE = "GPU"
HOST = "CPU"
"""Media of cached content, in vLLM's names. The device's is GPU, also where a CPU computes."""


class ContentObserver(Protocol):
    """Observer of cached content: see lockstep.cache.block_log."""

    def describe(self, seq: Any, page: int) -> None:
        """Name the page of a sequence that is about to be cached."""
        ...

    def add(self, pool: str, medium: str, key: Key) -> None:
        """Note that a medium now has the content of a key."""
        ...

    def remove(self, pool: str, medium: str, key: Key) -> None:
        """Note that a medium no longer has the content of a key."""
        ...


@dataclass(frozen=True)
class Move:
    """Copy between a unit (page or slot) of the device and the host pages of its bytes."""

    unit: int
    host_pages: tuple[int, ...]


Moves = dict[str, list[Move]]
"""Copies of one direction in a schedule, by pool name."""


class HostPool:
    """`size` host pages. An entry occupies a tuple of them; its content never changes.

    evictions: copies to the host of the current schedule. Only the latest copy to a host page is
    kept, so the copies may run in any order. num_pinned: host pages of pinned entries. observer:
    None, so that nothing is reported.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = list(range(size))
        self.entries: OrderedDict[Name, tuple[int, ...]] = OrderedDict()
        self.evictions: dict[Name, Move] = {}
        self.pinned: set[Name] = set()
        self.num_pinned = 0
        self.observer: ContentObserver | None = None

    @property
    def used(self) -> int:
        """Return the number of occupied host pages."""
        return self.size - len(self.free)

    def touch(self, name: Name) -> bool:
        """Mark an entry as used last; return whether it exists."""
        exists = name in self.entries
        if exists:
            self.entries.move_to_end(name)
        return exists

    def pin(self, name: Name) -> None:
        """Keep an entry until the schedule ends."""
        self.touch(name)
        if name not in self.pinned:
            self.pinned.add(name)
            self.num_pinned += len(self.entries[name])

    def store(self, name: Name, length: int) -> tuple[int, ...]:
        """Return `length` host pages for a new entry; () if pinned entries leave too few.

        Entries are evicted least recently used first.
        """
        if length > self.size - self.num_pinned:
            return ()
        while len(self.free) < length:
            oldest = next(entry for entry in self.entries if entry not in self.pinned)
            self.free.extend(self.entries.pop(oldest))
            # Its copy must not overwrite the new entry, which may get the same host pages.
            self.evictions.pop(oldest, None)
            if self.observer is not None:
                self.observer.remove(oldest[0], HOST, oldest[1])
        host_pages = tuple(self.free.pop() for _ in range(length))
        self.entries[name] = host_pages
        if self.observer is not None:
            self.observer.add(name[0], HOST, name[1])
        return host_pages

    def end_schedule(self) -> None:
        """Unpin all entries."""
        self.pinned.clear()
        self.num_pinned = 0

    def drop_cached(self) -> None:
        """Drop all entries."""
        self.end_schedule()
        self.entries.clear()
        self.free = list(range(self.size))

    def check(self) -> None:
        """Assert that every host page is free or belongs to one entry."""
        occupied = [page for host_pages in self.entries.values() for page in host_pages]
        assert sorted([*self.free, *occupied]) == list(range(self.size)), "a host page is lost"
        assert self.pinned <= set(self.entries), "a pinned entry is gone"
        targets = {name: move.host_pages for name, move in self.evictions.items()}
        assert targets.items() <= self.entries.items(), "a copy goes to another entry's pages"


@dataclass
class HostStore:
    """Host tier of one pool of the device.

    name: PAGES or SLOTS. pages: host pages per unit. fetches: copies back to the device of the
    current schedule. num_evicted, num_fetched: units that were copied so far.
    """

    pool: HostPool
    name: str
    pages: int = 1
    fetches: list[Move] = field(default_factory=list)
    num_evicted: int = 0
    num_fetched: int = 0

    def keep(self, unit: int, key: Key) -> None:
        """Copy an evicted unit to the host, unless it is there or the host has no space."""
        if self.pool.touch((self.name, key)):
            return
        host_pages = self.pool.store((self.name, key), self.pages)
        if host_pages:
            self.pool.evictions[self.name, key] = Move(unit, host_pages)

    def has(self, key: Key) -> bool:
        """Return whether the host has the content of a key."""
        return (self.name, key) in self.pool.entries

    def pin(self, key: Key) -> None:
        """Pin the content of a key until the schedule ends."""
        self.pool.pin((self.name, key))

    def fetch(self, unit: int, key: Key) -> None:
        """Copy the pinned content of a key into a unit; the host keeps it too."""
        self.fetches.append(Move(unit, self.pool.entries[self.name, key]))
        self.num_fetched += 1

    def end_schedule(self, evicted: Moves, fetched: Moves) -> None:
        """End a schedule: add its copies to `evicted` and `fetched`, if there are any."""
        names = [name for name in self.pool.evictions if name[0] == self.name]
        if names:
            evicted[self.name] = [self.pool.evictions.pop(name) for name in names]
            self.num_evicted += len(names)
        if self.fetches:
            fetched[self.name] = self.fetches
            self.fetches = []
