"""Host memory behind the pools: what is evicted there goes here, and comes back when it is wanted.

It is counted in host pages, of as many bytes as a page has; a snapshot takes several. All pools
share it: what was used longest ago makes room, whichever pool it came from. Ids alone, no tensors.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

Key = bytes
PAGES = "pages"
SLOTS = "slots"
"""Names of the pools, and of the units in them."""
Name = tuple[str, Key]
"""What something is found by: the pool that it came from, and its key there."""


@dataclass(frozen=True)
class Move:
    """A page or slot of the device, and the host pages that its bytes fill, in their order."""

    unit: int
    place: tuple[int, ...]


Moves = dict[str, list[Move]]
"""What moves one way in a schedule, by the name of its pool."""


class HostPool:
    """`size` host pages. A place is a tuple of them; what is in it never changes under its name.

    leaving: what the schedule in the making moves here. Of several that would go to one place it
    has the last alone, so its moves may be made in any order. held: host pages of what is pinned.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = list(range(size))
        self.places: OrderedDict[Name, tuple[int, ...]] = OrderedDict()
        self.leaving: dict[Name, Move] = {}
        self.pinned: set[Name] = set()
        self.held = 0

    @property
    def used(self) -> int:
        """Host pages that hold something."""
        return self.size - len(self.free)

    def touch(self, name: Name) -> bool:
        """Whether something is here; from now on it is the latest that was used."""
        known = name in self.places
        if known:
            self.places.move_to_end(name)
        return known

    def pin(self, name: Name) -> None:
        """Keeps what is here in its place until settle()."""
        self.touch(name)
        if name not in self.pinned:
            self.pinned.add(name)
            self.held += len(self.places[name])

    def store(self, name: Name, length: int) -> tuple[int, ...]:
        """A place of `length` host pages, where what was used longest ago leaves; () if what is
        pinned leaves too few."""
        if length > self.size - self.held:
            return ()
        while len(self.free) < length:
            oldest = next(known for known in self.places if known not in self.pinned)
            self.free.extend(self.places.pop(oldest))
            self.leaving.pop(oldest, None)
        place = tuple(self.free.pop() for _ in range(length))
        self.places[name] = place
        return place

    def settle(self) -> None:
        """Lets go of what is pinned."""
        self.pinned.clear()
        self.held = 0

    def forget(self) -> None:
        """Nothing is here any more."""
        self.settle()
        self.places.clear()
        self.free = list(range(self.size))

    def check(self) -> None:
        """Asserts that every host page is free or in one place."""
        places = [page for place in self.places.values() for page in place]
        assert sorted([*self.free, *places]) == list(range(self.size)), "a host page is lost"
        assert self.pinned <= set(self.places), "what is pinned is gone"
        ahead = {name: move.place for name, move in self.leaving.items()}
        assert ahead.items() <= self.places.items(), "a move goes to another's place"


@dataclass
class HostShelf:
    """What one pool has in host memory. name: the pool's; pages: host pages of each of its units.

    back: moves from there that the schedule in the making asks for. num_out, num_back: units moved
    so far.
    """

    pool: HostPool
    name: str
    pages: int = 1
    back: list[Move] = field(default_factory=list)
    num_out: int = 0
    num_back: int = 0

    def keep(self, unit: int, key: Key) -> None:
        """A unit is evicted: its bytes go to the host, unless they are there or find no room."""
        if self.pool.touch((self.name, key)):
            return
        place = self.pool.store((self.name, key), self.pages)
        if place:
            self.pool.leaving[self.name, key] = Move(unit, place)

    def has(self, key: Key) -> bool:
        """Whether the host has what is cached under a key."""
        return (self.name, key) in self.pool.places

    def pin(self, key: Key) -> None:
        """Keeps what the host has under a key until the schedule ends."""
        self.pool.pin((self.name, key))

    def bring(self, unit: int, key: Key) -> None:
        """What is pinned under a key is to be copied into a unit; the host keeps it too."""
        self.back.append(Move(unit, self.pool.places[self.name, key]))
        self.num_back += 1

    def settle(self, out: Moves, back: Moves) -> None:
        """Ends a schedule: its moves, if there are any, stand in `out` and `back` from now on."""
        leaving = [name for name in self.pool.leaving if name[0] == self.name]
        if leaving:
            out[self.name] = [self.pool.leaving.pop(name) for name in leaving]
            self.num_out += len(leaving)
        if self.back:
            back[self.name] = self.back
            self.back = []
