"""Log of cached blocks: what gateways must know to send a request where its prefix is cached.

A block is a full page that is cached, on the device or in host memory. Blocks of group PAGE_GROUP
are pages, those of STATE_GROUP are snapshots of the recurrent state after a page. A model with
recurrent layers can resume a prefix only where it has a snapshot. So the log lists a page only
while a snapshot at its end, or at the end of a listed page after it, makes it usable. No model can
resume a prefix of which an earlier page is missing. So the log lists a page only while all pages
before it are listed. Subscribers never get a parent that they do not know.
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lockstep.cache.groups import CacheSeq
from lockstep.cache.host_tier import DEVICE, HOST, PAGES, Key

Tokens: TypeAlias = "array[int]"  # Python 3.11 cannot subscript array
"""Token ids in 4 bytes each: a log keeps those of every cached page."""
MEDIA = (DEVICE, HOST)
PAGE_GROUP = 0
STATE_GROUP = 1
"""Indices of the groups."""


class BlocksStored(NamedTuple):
    """Event that blocks were cached: a chain, in order.

    hashes: of the blocks. parent: hash of the block before the first one; None at the start of a
    prompt. token_ids: tokens of all blocks. extra_keys: per block, what its hash covers besides
    the tokens: the adapter's name, digests of inputs that are no text, and in a prompt's first
    block the cache salt; None without any. adapter: name of the LoRA adapter, "" for the base
    model.
    """

    hashes: list[int]
    parent: int | None
    token_ids: Tokens
    extra_keys: list[tuple[str, ...] | None]
    adapter: str
    medium: str
    group: int


class BlocksRemoved(NamedTuple):
    """Event that blocks are no longer cached in a medium."""

    hashes: list[int]
    medium: str
    group: int


class BlocksCleared(NamedTuple):
    """Event that no block is cached any more."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


def block_hash(key: Key) -> int:
    """Return the hash of a page's key, 64 bits, by which gateways know the block."""
    return int.from_bytes(key[:8])


@dataclass(slots=True)
class _Block:
    """Cached page. media: where it is cached. is_listed: whether subscribers know it."""

    parent: Key | None
    token_ids: Tokens
    extra_keys: tuple[str, ...] | None
    adapter: str
    media: set[str]
    is_listed: bool = False


class BlockLog:
    """Log of the changes of one cache. Pools report content; drain() returns the events.

    has_state: the model has recurrent layers, so that only snapshots make pages usable. _children:
    page, cached or not -> cached pages that follow it, in the order in which they came. A common
    prefix may have tens of thousands, of which any may be removed. _supports: page -> number of
    things that make it usable: a snapshot at its end, and each usable page after it. Pages without
    any are absent.
    """

    def __init__(self, page_size: int, has_state: bool) -> None:
        self._page_size = page_size
        self._has_state = has_state
        self._blocks: dict[Key, _Block] = {}
        self._children: defaultdict[Key, dict[Key, None]] = defaultdict(dict)
        self._snapshots: defaultdict[Key, set[str]] = defaultdict(set)
        self._supports: defaultdict[Key, int] = defaultdict(int)
        self._page: tuple[CacheSeq, int] | None = None
        self._events: list[BlockEvent] = []

    def describe(self, seq: CacheSeq, page: int) -> None:
        """Name the page of a sequence that is about to be cached."""
        self._page = (seq, page)

    def add(self, pool: str, medium: str, key: Key) -> None:
        """Note that a medium now has the content of a key.

        pool: PAGES or SLOTS. A page must be described first, unless another medium has it.
        """
        if pool != PAGES:
            self._add_snapshot(medium, key)
            return
        block = self._blocks.get(key)
        if block is not None:
            block.media.add(medium)
            if block.is_listed:
                self._append_stored(key, block, medium, PAGE_GROUP)
            return
        block = self._blocks[key] = self._described_block()
        block.media.add(medium)
        if block.parent is not None:
            self._children[block.parent][key] = None
        if self._is_usable(key):
            self._list_from(key)

    def remove(self, pool: str, medium: str, key: Key) -> None:
        """Note that a medium no longer has the content of a key."""
        if pool != PAGES:
            self._remove_snapshot(medium, key)
            return
        block = self._blocks[key]
        if block.media != {medium}:
            block.media.remove(medium)
            if block.is_listed:
                self._append_removed(key, medium, PAGE_GROUP)
            return
        if block.is_listed:
            self._unlist_from(key)
        del self._blocks[key]
        if block.parent is not None:
            siblings = self._children[block.parent]
            del siblings[key]
            if not siblings:
                del self._children[block.parent]
        if self._is_usable(key):
            self._drop_support(block.parent)

    def clear(self) -> None:
        """Note that nothing is cached any more. Events that were not drained are dropped."""
        self._blocks.clear()
        self._children.clear()
        self._snapshots.clear()
        self._supports.clear()
        self._events = [BlocksCleared()]

    def drain(self) -> list[BlockEvent]:
        """Return the events since the last call, in order."""
        events = self._events
        if events:
            self._events = []
        return events

    def check(self, pages: dict[str, set[Key]], slots: dict[str, set[Key]]) -> None:
        """Assert that the log has the content of the pools. Arguments: medium -> keys."""
        for medium in MEDIA:
            logged = {key for key, block in self._blocks.items() if medium in block.media}
            assert logged == pages[medium], f"the log differs from the pages of {medium}"
            logged = {key for key, media in self._snapshots.items() if medium in media}
            assert logged == slots[medium], f"the log differs from the snapshots of {medium}"
        supports = {key: 1 for key in self._snapshots}
        children: dict[Key, dict[Key, None]] = {}
        for key, block in self._blocks.items():
            if block.parent is not None:
                children.setdefault(block.parent, {})[key] = None
                if self._has_state and self._is_usable(key):
                    supports[block.parent] = supports.get(block.parent, 0) + 1
        assert supports == self._supports, "supports of pages are miscounted"
        assert children == self._children, "the children of a page are wrong"
        for key, block in self._blocks.items():
            is_reached = block.parent is None or self._is_listed(block.parent)
            assert block.is_listed == (is_reached and self._is_usable(key)), "listed wrongly"

    def _described_block(self) -> _Block:
        """Return the block of the page that describe() named, cached nowhere yet."""
        assert self._page is not None, "a page was cached without a description"
        seq, page = self._page
        begin = page * self._page_size
        end = begin + self._page_size
        split = len(seq.prompt)
        token_ids = array("I", seq.prompt[begin:end])
        if end > split:
            token_ids.extend(seq.output[max(begin - split, 0) : end - split])
        extra = [seq.adapter] if seq.adapter else []
        if seq.digests:
            extra += [seq.digests[at].hex() for at in sorted(seq.digests) if begin <= at < end]
        if page == 0 and seq.cache_salt:
            extra.append(seq.cache_salt)
        parent = seq.keys[page - 1] if page else None
        return _Block(parent, token_ids, tuple(extra) or None, seq.adapter, set())

    def _is_usable(self, key: Key) -> bool:
        """Return whether requests can resume at a page, or at a page after it."""
        return not self._has_state or key in self._supports

    def _is_listed(self, key: Key) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.is_listed

    def _add_snapshot(self, medium: str, key: Key) -> None:
        media = self._snapshots[key]
        is_new = not media
        media.add(medium)
        block = self._blocks.get(key)
        if block is not None and block.is_listed:
            self._append_stored(key, block, medium, STATE_GROUP)
        if is_new:
            self._supports[key] += 1
            if block is not None and self._supports[key] == 1:
                self._list_from(key)

    def _remove_snapshot(self, medium: str, key: Key) -> None:
        media = self._snapshots[key]
        media.remove(medium)
        block = self._blocks.get(key)
        if block is not None and block.is_listed:
            self._append_removed(key, medium, STATE_GROUP)
        if not media:
            del self._snapshots[key]
            self._drop_support(key)

    def _drop_support(self, key: Key | None) -> None:
        """Take a support from a page, which is then unlisted if it was the last one."""
        while key is not None and self._has_state:
            self._supports[key] -= 1
            if self._supports[key]:
                return
            del self._supports[key]
            block = self._blocks.get(key)
            if block is None:
                return
            if block.is_listed:
                self._unlist_from(key)
            key = block.parent

    def _list_from(self, key: Key) -> None:
        """List a page that became usable, with the pages around it that it makes usable.

        Pages of which an earlier page is not cached are not listed: no request can use them, and
        subscribers would not know their parent.
        """
        parent = self._blocks[key].parent
        while parent is not None and self._has_state:
            self._supports[parent] += 1
            if self._supports[parent] > 1 or parent not in self._blocks:
                break
            key = parent
            parent = self._blocks[key].parent
        if parent is not None and not self._is_listed(parent):
            return
        blocks = []
        pending = [key]
        while pending:  # subscribers know a block's parent before the block
            key = pending.pop()
            blocks.append((key, self._blocks[key]))
            pending += filter(self._is_usable, self._children.get(key, ()))
        for _, block in blocks:
            block.is_listed = True
        # One medium of every page comes before the second medium of any.
        for key, block in blocks:
            self._append_stored(key, block, DEVICE if DEVICE in block.media else HOST, PAGE_GROUP)
        for key, block in blocks:
            if len(block.media) == len(MEDIA):
                self._append_stored(key, block, HOST, PAGE_GROUP)
        for key, block in blocks:
            for medium in self._snapshots.get(key, ()):
                self._append_stored(key, block, medium, STATE_GROUP)

    def _unlist_from(self, key: Key) -> None:
        """Unlist a page and the listed pages after it, the last one first."""
        blocks = []
        pending = [key]
        while pending:
            key = pending.pop()
            blocks.append((key, self._blocks[key]))
            pending += filter(self._is_listed, self._children.get(key, ()))
        blocks.reverse()
        for key, block in blocks:
            block.is_listed = False
            for medium in self._snapshots.get(key, ()):
                self._append_removed(key, medium, STATE_GROUP)
        for medium in MEDIA:
            for key, block in blocks:
                if medium in block.media:
                    self._append_removed(key, medium, PAGE_GROUP)

    def _append_stored(self, key: Key, block: _Block, medium: str, group: int) -> None:
        """Append the event of a stored block, or extend the last event where it continues that."""
        parent = None if block.parent is None else block_hash(block.parent)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlocksStored)
            and (last.medium, last.group, last.adapter) == (medium, group, block.adapter)
            and last.hashes[-1] == parent
        ):
            last.hashes.append(block_hash(key))
            last.token_ids.extend(block.token_ids)
            last.extra_keys.append(block.extra_keys)
            return
        event = BlocksStored(
            [block_hash(key)],
            parent,
            block.token_ids[:],
            [block.extra_keys],
            block.adapter,
            medium,
            group,
        )
        self._events.append(event)

    def _append_removed(self, key: Key, medium: str, group: int) -> None:
        """Append the event of a removed block, or extend the last event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and (last.medium, last.group) == (medium, group):
            last.hashes.append(block_hash(key))
        else:
            self._events.append(BlocksRemoved([block_hash(key)], medium, group))
