"""Groups of the cache: one per storage kind, each with its own pool.

PagedGroup: a page has the keys and values of `page_size` tokens; full pages may be shared.
StateGroup: a slot has all recurrent state of one row, or a snapshot of it at a page boundary.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from lockstep.cache.host_tier import PAGES, SLOTS, HostPool, HostStore, Key
from lockstep.cache.pool import Pool


def root_key(cache_salt: str, adapter: str = "") -> bytes:
    """Return the parent key of a prompt's first page; empty without salt and adapter.

    It equals no page key. adapter: digest of the adapter, "" for the base model.
    """
    salt = cache_salt.encode("utf-8", "surrogatepass")
    if adapter:
        # The digest has a fixed length, so that no salt can continue it to another pair.
        return blake2b(bytes.fromhex(adapter) + salt, person=b"adapter").digest()
    return blake2b(salt, person=b"salt").digest() if salt else b""


@dataclass(eq=False)
class CacheSeq:
    """Cache record of one request.

    output: the request's own list of answer tokens, which grows. root: parent key of the first page
    (root_key); pages are shared among requests of the same root only. reuse: whether the request
    may resume cached prefixes. publish: whether its pages and snapshots are cached for others.
    cache_salt, adapter: the salt and the adapter's name of which the root is a hash; only a block
    log reads them. digests: token position -> digest of the content that a placeholder token there
    represents, such as an image. pages: page j has tokens [j * page_size, (j + 1) * page_size); the
    first `published` are cached. slot: state slot, 0 for none. source: slot of the snapshot that
    the sequence resumed from, 0 for none. branch: tokens of a cached prefix whose state has no
    snapshot, else 0; another prompt shares the prefix and continues differently after it. keys:
    keys of the first pages, computed on demand.
    """

    prompt: Sequence[int]
    output: Sequence[int] = ()
    root: bytes = b""
    reuse: bool = True
    publish: bool = True
    cache_salt: str = ""
    adapter: str = ""
    digests: Mapping[int, bytes] = field(default_factory=dict)
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    source: int = 0
    branch: int = 0
    published: int = 0
    keys: list[Key] = field(default_factory=list)

    def key(self, page: int, page_size: int) -> Key:
        """Return the key of a full page: a hash of everything up to its end, chained page by page.

        A key covers the parent's key, the page's tokens and the extra digests within the page.
        """
        while len(self.keys) <= page:
            begin = len(self.keys) * page_size
            tokens = self.prompt[begin : begin + page_size]
            split = len(self.prompt)
            if begin + page_size > split:
                tail = self.output[max(begin - split, 0) : begin + page_size - split]
                tokens = [*tokens, *tail]
            parent = self.keys[-1] if self.keys else self.root
            data = array("q", tokens).tobytes()
            # Fixed lengths and the parent's length make the encoding unambiguous.
            hashed = blake2b(len(parent).to_bytes(8) + parent + data)
            for position in sorted(self.digests):
                if begin <= position < begin + page_size:
                    digest = self.digests[position]
                    hashed.update(position.to_bytes(8) + len(digest).to_bytes(8) + digest)
            self.keys.append(hashed.digest())
        return self.keys[page]


class PagedGroup:
    """Pages of keys and values. Cached pages are full, so a row writes only uncached pages."""

    def __init__(self, num_pages: int, page_size: int, host: HostPool) -> None:
        self.pool = Pool(num_pages, HostStore(host, PAGES))
        self.page_size = page_size

    def keys(self, seq: CacheSeq, pages: int) -> list[Key]:
        """Return the keys of the first `pages` pages."""
        return [seq.key(page, self.page_size) for page in range(pages)]

    def hit(self, seq: CacheSeq, limit: int) -> int:
        """Return the number of leading pages that are cached, at most `limit`."""
        count = 0
        while count < limit and self.pool.holds(seq.key(count, self.page_size)):
            count += 1
        return count

    def resume(self, seq: CacheSeq, pages: int) -> None:
        """Share the first `pages` cached pages, which are pinned."""
        seq.pages = self.pool.fetch_all(self.keys(seq, pages))
        seq.published = pages

    def reserve(self, seq: CacheSeq, tokens: int) -> bool:
        """Grow to cover `tokens` tokens; return False, and change nothing, if pages are short."""
        missing = -(-tokens // self.page_size) - len(seq.pages)
        if missing > self.pool.available:
            return False
        seq.pages.extend(self.pool.take() for _ in range(missing))
        return True

    def commit(self, seq: CacheSeq, tokens: int) -> None:
        """Publish the pages that `tokens` final tokens fill."""
        for page in range(seq.published, min(tokens // self.page_size, len(seq.pages))):
            key = seq.key(page, self.page_size)
            if self.pool.observer is not None:
                self.pool.observer.describe(seq, page)
            self.pool.publish(seq.pages[page], key)
            seq.published = page + 1

    def release(self, seq: CacheSeq) -> None:
        """Drop all pages, last first, so that a prefix is evicted after what follows it."""
        for page in reversed(seq.pages):
            self.pool.drop(page)
        seq.pages = []
        seq.published = 0

    def owners(self, seqs: set[CacheSeq]) -> Counter[int]:
        """Count the owners of each page."""
        return Counter(page for seq in seqs for page in seq.pages)


class StateGroup:
    """Slots of recurrent state: one per row; slots that no row needs may hold snapshots."""

    def __init__(self, num_slots: int, page_size: int, host: HostPool, host_pages: int) -> None:
        self.pool = Pool(num_slots, HostStore(host, SLOTS, host_pages))
        self.page_size = page_size
        self.pins: list[int] = []

    def keys(self, seq: CacheSeq, pages: int) -> list[Key]:
        """Return the key of the snapshot after `pages` pages; empty for 0 pages."""
        return [seq.key(pages - 1, self.page_size)] if pages else []

    def hit(self, seq: CacheSeq, limit: int) -> int:
        """Return the maximum number of pages, up to `limit`, after which there is a snapshot."""
        return next(
            (n for n in range(limit, 0, -1) if self.pool.holds(seq.key(n - 1, self.page_size))), 0
        )

    def resume(self, seq: CacheSeq, pages: int) -> None:
        """Take a slot for the row and pin the snapshot after `pages` pages until end_schedule()."""
        sources = self.pool.fetch_all(self.keys(seq, pages))
        self.pins.extend(sources)
        seq.source = sources[0] if sources else 0
        seq.slot = self.pool.take()

    def snapshot(self, seq: CacheSeq, tokens: int) -> int:
        """Return a slot for the state after `tokens` tokens; 0 if it is cached or no slot is
        left.
        """
        key = seq.key(tokens // self.page_size - 1, self.page_size)
        slot = 0 if self.pool.find(key) else self.pool.take()
        if slot:
            self.pool.publish(slot, key)
            self.pins.append(slot)
        return slot

    def end_schedule(self) -> None:
        """Unpin the snapshots that this schedule reads or writes."""
        for slot in self.pins:
            self.pool.drop(slot)
        self.pins = []

    def release(self, seq: CacheSeq) -> None:
        """Drop the row's slot."""
        if seq.slot:
            self.pool.drop(seq.slot)
        seq.slot = 0

    def owners(self, seqs: set[CacheSeq]) -> Counter[int]:
        """Count the owners of each slot."""
        return Counter([*(seq.slot for seq in seqs if seq.slot), *self.pins])
