"""Pool of units, which are ids of pages or slots: each is free, idle or referenced.

An idle unit is cached and has no owner. Ids start at 1; 0 is the null page or slot, which is never
handed out.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from lockstep.cache.host_tier import DEVICE, ContentObserver, HostPool, HostStore, Key


class Pool:
    """Pool of `size` units, the null one included.

    Idle units are evicted least recently used first, to the host tier if there is one. refs: unit
    -> number of its owners. by_key, key_of: maps between keys and cached units. observer: None, so
    that nothing is reported.
    """

    def __init__(self, size: int, host: HostStore | None = None) -> None:
        self.size = size
        self.host = host or HostStore(HostPool(0), "")
        self.free = deque(range(1, size))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.refs: dict[int, int] = {}
        self.by_key: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.observer: ContentObserver | None = None

    @property
    def total(self) -> int:
        """Return the number of ids that can be handed out."""
        return max(self.size - 1, 0)

    @property
    def available(self) -> int:
        """Return the number of ids that take() can hand out now."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Return the number of referenced ids."""
        return len(self.refs)

    def take(self) -> int:
        """Return an id for one exclusive owner, evicting if necessary; 0 if all are referenced."""
        if self.free:
            unit = self.free.popleft()
        elif self.idle:
            unit, _ = self.idle.popitem(last=False)  # least recently used
            key = self.key_of.pop(unit)
            del self.by_key[key]
            self.host.keep(unit, key)
            if self.observer is not None:  # after host memory has it: the content stays cached
                self.observer.remove(self.host.name, DEVICE, key)
        else:
            return 0
        self.refs[unit] = 1
        return unit

    def share(self, unit: int) -> None:
        """Add a read-only owner to a cached id."""
        self.idle.pop(unit, None)
        self.refs[unit] = self.refs.get(unit, 0) + 1

    def drop(self, unit: int) -> None:
        """Remove an owner. Without owners an id is idle if it is cached, else free."""
        self.refs[unit] -= 1
        if self.refs[unit]:
            return
        del self.refs[unit]
        if unit in self.key_of:
            self.idle[unit] = None
        else:
            self.free.append(unit)

    def publish(self, unit: int, key: Key) -> None:
        """Cache the final content of a referenced id under a key. The first id of a key stays."""
        if key not in self.by_key and unit not in self.key_of:
            self.by_key[key] = unit
            self.key_of[unit] = key
            if self.observer is not None:
                self.observer.add(self.host.name, DEVICE, key)

    def find(self, key: Key) -> int:
        """Return the id cached under a key, or 0."""
        return self.by_key.get(key, 0)

    def holds(self, key: Key) -> bool:
        """Return whether content is cached under a key, here or in host memory."""
        return key in self.by_key or self.host.has(key)

    def cost(self, keys: Sequence[Key]) -> int:
        """Return by how much `available` falls once the content of these keys has owners."""
        return sum(self.find(key) not in self.refs for key in keys)

    def pin(self, keys: Sequence[Key]) -> None:
        """Pin the content of these keys; called before any unit is taken.

        A cached unit gets one more owner; content in host memory stays there until the schedule
        ends. The first key counts as most recently used.
        """
        # In reverse, so that a prefix is evicted after the pages that continue it.
        for key in reversed(keys):
            if key in self.by_key:
                self.share(self.by_key[key])
            else:
                self.host.pin(key)

    def fetch_all(self, keys: Sequence[Key]) -> list[int]:
        """Return the units of pinned content; content in host memory is copied to fresh units."""
        return [self.find(key) or self._fetch(key) for key in keys]

    def _fetch(self, key: Key) -> int:
        unit = self.take()
        self.host.fetch(unit, key)
        self.publish(unit, key)
        return unit

    def drop_cached(self) -> None:
        """Drop all cached content: idle ids become free, referenced ones keep their owners."""
        self.free.extend(self.idle)
        for table in (self.idle, self.by_key, self.key_of):
            table.clear()

    def check(self, owners: Counter[int]) -> None:
        """Assert that every id has one state, and that references are exactly `owners`."""
        ids = [*self.free, *self.idle, *self.refs]
        assert sorted(ids) == list(range(1, self.size)), "an id is lost, doubled, or null"
        assert dict(owners) == self.refs, f"references {self.refs} but owners {dict(owners)}"
        assert {i: k for k, i in self.by_key.items()} == self.key_of, "key maps disagree"
        assert all(i in self.key_of for i in self.idle), "an idle id without a key"
        assert not any(i in self.key_of for i in self.free), "a free id with a key"
