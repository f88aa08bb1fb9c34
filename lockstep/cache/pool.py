"""A pool of pages or slots: free, idle (unreferenced but cached) or referenced, never two of them.

Ids run from 1; 0 is the null page or slot and is never given out.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from lockstep.cache.host_tier import HostPool, HostShelf, Key


class Pool:
    """`size` ids including the null one. Idle ids are evicted least recently used first, to host
    memory where there is some."""

    def __init__(self, size: int, host: HostShelf | None = None) -> None:
        self.size = size
        self.host = host or HostShelf(HostPool(0), "")
        self.free = deque(range(1, size))
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.refs: dict[int, int] = {}
        self.by_key: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}

    @property
    def total(self) -> int:
        """Ids that can be given out at all."""
        return max(self.size - 1, 0)

    @property
    def available(self) -> int:
        """Ids that take() can give now."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Ids that somebody references."""
        return len(self.refs)

    def take(self) -> int:
        """An id for one exclusive owner, evicting if need be; 0 if all are referenced."""
        if self.free:
            taken = self.free.popleft()
        elif self.idle:
            taken, _ = self.idle.popitem(last=False)
            key = self.key_of.pop(taken)
            del self.by_key[key]
            self.host.keep(taken, key)
        else:
            return 0
        self.refs[taken] = 1
        return taken

    def share(self, taken: int) -> None:
        """One more owner of a cached id, who may only read it."""
        self.idle.pop(taken, None)
        self.refs[taken] = self.refs.get(taken, 0) + 1

    def drop(self, taken: int) -> None:
        """One owner less. The last one leaves it idle if it is cached, else free."""
        self.refs[taken] -= 1
        if self.refs[taken]:
            return
        del self.refs[taken]
        if taken in self.key_of:
            self.idle[taken] = None
        else:
            self.free.append(taken)

    def publish(self, taken: int, key: Key) -> None:
        """Makes a referenced id findable; its content is final. The first under a key stays."""
        if key not in self.by_key and taken not in self.key_of:
            self.by_key[key] = taken
            self.key_of[taken] = key

    def find(self, key: Key) -> int:
        """The id published under a key, or 0."""
        return self.by_key.get(key, 0)

    def holds(self, key: Key) -> bool:
        """Whether something is cached under a key, here or in host memory."""
        return key in self.by_key or self.host.has(key)

    def cost(self, keys: Sequence[Key]) -> int:
        """How many ids fewer are available once what is cached under these keys has an owner."""
        return sum(self.find(key) not in self.refs for key in keys)

    def pin(self, keys: Sequence[Key]) -> None:
        """Holds what is cached under these keys: here by one more owner, in host memory until the
        schedule ends. To be done for all before anything is taken. The first was used last."""
        for key in reversed(keys):
            if key in self.by_key:
                self.share(self.by_key[key])
            else:
                self.host.pin(key)

    def bring(self, keys: Sequence[Key]) -> list[int]:
        """The ids of what was pinned; what only the host has comes back into fresh ones."""
        return [self.find(key) or self._fetch(key) for key in keys]

    def _fetch(self, key: Key) -> int:
        taken = self.take()
        self.host.bring(taken, key)
        self.publish(taken, key)
        return taken

    def forget(self) -> None:
        """Nothing is cached any more: idle ids are free, referenced ones keep their owners."""
        self.free.extend(self.idle)
        for table in (self.idle, self.by_key, self.key_of):
            table.clear()

    def check(self, owners: Counter[int]) -> None:
        """Asserts that every id is in one place, and that references are exactly `owners`."""
        places = [*self.free, *self.idle, *self.refs]
        assert sorted(places) == list(range(1, self.size)), "an id is lost, doubled, or null"
        assert dict(owners) == self.refs, f"references {self.refs} but owners {dict(owners)}"
        assert {i: k for k, i in self.by_key.items()} == self.key_of, "key maps disagree"
        assert all(i in self.key_of for i in self.idle), "an idle id without a key"
        assert not any(i in self.key_of for i in self.free), "a free id with a key"
