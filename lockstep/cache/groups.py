"""Storage laws: one group per law, each with its own pool.

PagedGroup: a page holds the keys and values of `page_size` tokens; full pages may be shared.
StateGroup: a slot holds all recurrent state of one row, or a snapshot of it at a page boundary.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lockstep.cache.host_tier import PAGES, SLOTS, HostPool, HostShelf, Key
from lockstep.cache.pool import Pool


def salt_of(text: str) -> bytes:
    """A user's salt as what page keys begin with; "" for none. It equals no page's own key."""
    return blake2b(text.encode("utf-8", "surrogatepass"), person=b"salt").digest() if text else b""


@dataclass(eq=False)
class CacheSeq:
    """What the cache keeps for one request. `output` is the request's own, growing list.

    salt: pages are shared among requests of the same salt only.
    pages: where tokens [j * page_size, (j + 1) * page_size) are; the first `published` are cached.
    slot: its state, 0 if it has none. source: the snapshot it resumed from, 0 if none.
    branch: its first tokens whose pages are cached, where no snapshot of the state behind them is;
    else 0. There it parts from other prompts.
    """

    prompt: Sequence[int]
    output: Sequence[int] = ()
    salt: bytes = b""
    reuse: bool = True
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    source: int = 0
    branch: int = 0
    published: int = 0
    keys: list[Key] = field(default_factory=list)

    def key(self, page: int, page_size: int) -> Key:
        """The key of a full page: a hash of all tokens up to its end, chained page by page."""
        while len(self.keys) <= page:
            begin = len(self.keys) * page_size
            tokens = self.prompt[begin : begin + page_size]
            split = len(self.prompt)
            if begin + page_size > split:
                tail = self.output[max(begin - split, 0) : begin + page_size - split]
                tokens = [*tokens, *tail]
            parent = self.keys[-1] if self.keys else self.salt
            data = array("q", tokens).tobytes()
            self.keys.append(blake2b(len(parent).to_bytes(8) + parent + data).digest())
        return self.keys[page]


class PagedGroup:
    """Keys and values. A row writes only pages that it alone owns: cached ones are full."""

    def __init__(self, num_pages: int, page_size: int, host: HostPool) -> None:
        self.pool = Pool(num_pages, HostShelf(host, PAGES))
        self.page_size = page_size

    def keys(self, seq: CacheSeq, pages: int) -> list[Key]:
        """What the first `pages` pages are cached under."""
        return [seq.key(page, self.page_size) for page in range(pages)]

    def hit(self, seq: CacheSeq, most: int) -> int:
        """Leading pages, at most `most`, that are cached."""
        count = 0
        while count < most and self.pool.holds(seq.key(count, self.page_size)):
            count += 1
        return count

    def resume(self, seq: CacheSeq, pages: int) -> None:
        """Shares the first `pages` cached pages, which are pinned."""
        seq.pages = self.pool.bring(self.keys(seq, pages))
        seq.published = pages

    def reserve(self, seq: CacheSeq, tokens: int) -> bool:
        """Grows to cover `tokens`, or changes nothing."""
        missing = -(-tokens // self.page_size) - len(seq.pages)
        if missing > self.pool.available:
            return False
        seq.pages.extend(self.pool.take() for _ in range(missing))
        return True

    def commit(self, seq: CacheSeq, tokens: int) -> None:
        """Publishes the pages that `tokens` final tokens fill."""
        for page in range(seq.published, min(tokens // self.page_size, len(seq.pages))):
            self.pool.publish(seq.pages[page], seq.key(page, self.page_size))
            seq.published = page + 1

    def release(self, seq: CacheSeq) -> None:
        """Drops all pages, last first, so that a prefix outlives what follows it."""
        for page in reversed(seq.pages):
            self.pool.drop(page)
        seq.pages = []
        seq.published = 0

    def owners(self, seqs: set[CacheSeq]) -> Counter[int]:
        """How often each page is owned."""
        return Counter(page for seq in seqs for page in seq.pages)


class StateGroup:
    """Recurrent state: one slot per row; all slots that no row needs may hold snapshots."""

    def __init__(self, num_slots: int, page_size: int, host: HostPool, host_pages: int) -> None:
        self.pool = Pool(num_slots, HostShelf(host, SLOTS, host_pages))
        self.page_size = page_size
        self.pins: list[int] = []

    def keys(self, seq: CacheSeq, pages: int) -> list[Key]:
        """What the snapshot after `pages` pages is cached under; none after none."""
        return [seq.key(pages - 1, self.page_size)] if pages else []

    def hit(self, seq: CacheSeq, most: int) -> int:
        """The most pages, at most `most`, after which there is a snapshot."""
        return next(
            (n for n in range(most, 0, -1) if self.pool.holds(seq.key(n - 1, self.page_size))), 0
        )

    def resume(self, seq: CacheSeq, pages: int) -> None:
        """A slot for the row, and the pinned snapshot after `pages` pages, held until settle()."""
        sources = self.pool.bring(self.keys(seq, pages))
        self.pins.extend(sources)
        seq.source = sources[0] if sources else 0
        seq.slot = self.pool.take()

    def snapshot(self, seq: CacheSeq, tokens: int) -> int:
        """A slot for the state after `tokens` tokens; 0 if it is cached or none is left."""
        key = seq.key(tokens // self.page_size - 1, self.page_size)
        slot = 0 if self.pool.find(key) else self.pool.take()
        if slot:
            self.pool.publish(slot, key)
            self.pins.append(slot)
        return slot

    def settle(self) -> None:
        """Lets go of the snapshots that this schedule reads or writes."""
        for slot in self.pins:
            self.pool.drop(slot)
        self.pins = []

    def release(self, seq: CacheSeq) -> None:
        """Drops the row's slot."""
        if seq.slot:
            self.pool.drop(seq.slot)
        seq.slot = 0

    def owners(self, seqs: set[CacheSeq]) -> Counter[int]:
        """How often each slot is owned."""
        return Counter([*(seq.slot for seq in seqs if seq.slot), *self.pins])
