"""Choice of a replica for a request: by the prefixes that replicas hold, and by their load."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.replicas.messages import Call, Hello
from lockstep.step import PAGE_SIZE

TOKENS_PER_REQUEST = 128
"""Prompt tokens that cost as much as one more request on a replica.

A cached prefix attracts a request only where it saves more than that per request of difference: a
short common system prompt must not gather all requests on one replica.
"""
MAX_PAGES = 1 << 17
"""Maximum pages that are remembered per replica, about 20 MB; a larger cache counts as this."""
SPARE_DIVISOR = 4
"""Divisor of a replica's rows. The quotient and one more are the requests that a full replica may
have more than the replica with the fewest requests."""


@dataclass
class ReplicaState:
    """Knowledge of one replica.

    numerics: its fingerprint, None before its first report. num_rows: requests that it runs at
    once. num_pages: size of its cache. ready: its engine is not being restarted. tags: calls on
    it. pages: keys of the pages that were sent to it, in the order of their last use.
    """

    numerics: str | None = None
    num_rows: int = 1
    num_pages: int = 0
    ready: bool = True
    tags: set[str] = field(default_factory=set)
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages that were sent to the replica."""
        return next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))

    def remember(self, keys: Sequence[bytes]) -> None:
        """Note that pages were sent; forget the longest unused ones that the cache cannot hold."""
        # The first page is the most recently used one: the end of a prefix is evicted first.
        for key in reversed(keys):
            self.pages[key] = None
            self.pages.move_to_end(key)
        while len(self.pages) > min(self.num_pages, MAX_PAGES):
            self.pages.popitem(last=False)


class ReplicaRouter:
    """Router of one client. Its methods may be called from any thread.

    A call goes to the replica with the lowest cost: the prompt tokens that are not cached there,
    and TOKENS_PER_REQUEST for each of its requests. A replica whose rows are full is left out where
    it has many more requests than another one. Ties go to the one that remembers the fewest pages.

    on_change: called with the ids of new and of removed replicas. on_refuse: called with a call
    that no replica can take, since all have other numerics, and with their fingerprints.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[Collection[str], Collection[str]], None] = _ignore
        self.on_refuse: Callable[[Call, Collection[str]], None] = _ignore
        self._lock = threading.Lock()
        self._replicas: dict[str, ReplicaState] = {}
        self._replica_of: dict[str, str] = {}
        self._listed: set[str] = set()

    @property
    def replica_ids(self) -> list[str]:
        """Return the ids of the present replicas."""
        with self._lock:
            return list(self._replicas)

    @property
    def num_ready(self) -> int:
        """Return the number of replicas whose engines run."""
        with self._lock:
            return sum(state.ready for state in self._replicas.values())

    @property
    def all_numerics(self) -> list[str]:
        """Return the different fingerprints of the present replicas."""
        with self._lock:
            return sorted({s.numerics for s in self._replicas.values() if s.numerics is not None})

    def update(self, replica_ids: Iterable[str]) -> None:
        """Note which replicas are present."""
        listed = set(replica_ids)
        with self._lock:
            self._listed = listed
            removed = self._replicas.keys() - listed
            added = listed - self._replicas.keys()
            for replica_id in removed:
                del self._replicas[replica_id]
            for replica_id in added:
                # A replica that is listed again before it is drained still has calls.
                tags = {tag for tag, chosen in self._replica_of.items() if chosen == replica_id}
                self._replicas[replica_id] = ReplicaState(tags=tags)
        if added or removed:
            self.on_change(added, removed)

    def remove(self, replica_id: str) -> None:
        """Note that a replica cannot be reached, before update() does without it."""
        with self._lock:
            self._replicas.pop(replica_id, None)

    def restore(self, replica_id: str) -> None:
        """Try a removed replica again, if it is still listed."""
        with self._lock:
            if replica_id not in self._listed or replica_id in self._replicas:
                return
            self._replicas[replica_id] = ReplicaState()
        self.on_change([replica_id], [])

    def introduce(self, replica_id: str, hello: Hello) -> None:
        """Note the first report of a replica."""
        with self._lock:
            if (state := self._replicas.get(replica_id)) is not None:
                state.numerics = hello.numerics
                state.num_rows = hello.num_rows
                state.num_pages = hello.num_pages

    def set_ready(self, replica_id: str, ready: bool) -> None:
        """Note that the engine of a replica runs, or is lost and its cache empty."""
        with self._lock:
            if (state := self._replicas.get(replica_id)) is not None:
                state.ready = ready
                if not ready:
                    state.pages.clear()

    def forget_pages(self) -> None:
        """Note that all caches are empty."""
        with self._lock:
            for state in self._replicas.values():
                state.pages.clear()

    def choose(self, call: Call, candidates: Collection[str]) -> str | None:
        """Return the replica for a call, which counts as its load until end(); None for none now.

        The choice is stored in the call; a second call of this method replaces it.
        """
        with self._lock:
            self._release(call.tag)
            states = {i: s for i, s in self._replicas.items() if i in candidates and s.numerics}
            allowed = {i: s for i, s in states.items() if s.numerics == call.numerics}
            if not call.numerics or (call.allow_other_numerics and not allowed):
                allowed = states
            if allowed:
                replica_id = _cheapest(call.page_keys, allowed)
                self._replica_of[call.tag] = call.replica_id = replica_id
                allowed[replica_id].tags.add(call.tag)
                allowed[replica_id].remember(call.page_keys)
                return replica_id
            known = {state.numerics or "" for state in self._replicas.values()}
        if known and "" not in known:
            self.on_refuse(call, sorted(known))
        return None

    def end(self, tag: str) -> None:
        """Note that a call has ended."""
        with self._lock:
            self._release(tag)

    def _release(self, tag: str) -> None:
        state = self._replicas.get(self._replica_of.pop(tag, ""))
        if state is not None:
            state.tags.discard(tag)


def _cheapest(keys: Sequence[bytes], replicas: dict[str, ReplicaState]) -> str:
    """Return the id of the replica with the lowest cost: see ReplicaRouter."""
    ready = {i: s for i, s in replicas.items() if s.ready} or replicas
    fewest = min(len(state.tags) for state in ready.values())

    def is_open(state: ReplicaState) -> bool:
        limit = max(state.num_rows, fewest + 1 + state.num_rows // SPARE_DIVISOR)
        return len(state.tags) < limit

    def cost(item: tuple[str, ReplicaState]) -> tuple[int, int, str]:
        replica_id, state = item
        missing = (len(keys) - state.num_cached(keys)) * PAGE_SIZE
        return missing + len(state.tags) * TOKENS_PER_REQUEST, len(state.pages), replica_id

    return min(((i, s) for i, s in ready.items() if is_open(s)), key=cost)[0]


def _ignore(*arguments: object) -> None:
    """Ignore an event."""
