"""Subscriber of KV events, as a gateway has it: it knows the wire format and nothing of the cache.

It is written against vLLM's schema (vllm/distributed/kv_events.py) alone, and reads both encodings
of events. A block is found by the hash of its parent, its tokens and its extra keys, so that no
hash is ever computed here.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED = ("block_hashes", "medium", "group_idx")
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
ATTENTION = {"full_attention", "mla_attention"}

Block = tuple[int | None, tuple[int, ...], tuple[Any, ...]]
"""Hash of the parent, tokens, and extra keys."""


def fields_of(event: Any) -> dict[str, Any]:
    """Return the fields of an event that is a map or an array, with its tag as "type"."""
    if isinstance(event, dict):
        assert set(event) - {"type"} <= set(FIELDS[event["type"]]), "an unknown field"
        return event
    tag, *values = event
    return {"type": tag, **dict(zip(FIELDS[tag], values, strict=False))}


class PrefixIndex:
    """Index of the blocks that one server has cached, from its events.

    num_batches: batches applied. media: media of stored blocks seen so far.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self.media: set[str] = set()
        self._block_size = 0
        self._hashes: dict[Block, int] = {}
        self._kinds: dict[int, str] = {}
        # Group -> hash -> media that have the block.
        self._cached: defaultdict[int, defaultdict[int, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )

    def apply(self, payload: bytes) -> None:
        """Apply a batch in MessagePack."""
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(seconds, float) and rank == 0 and events
        for event in events:
            fields = fields_of(event)
            {
                "BlockStored": self._store,
                "BlockRemoved": self._remove,
                "AllBlocksCleared": lambda _: self._cached.clear(),
            }[fields["type"]](fields)
        self.num_batches += 1

    def _store(self, event: dict[str, Any]) -> None:
        size = self._block_size = event["block_size"]
        group = event["group_idx"]
        self._kinds[group] = event["kv_cache_spec_kind"]
        self.media.add(event["medium"])
        hashes = event["block_hashes"]
        assert len(event["token_ids"]) == size * len(hashes)
        assert len(event["extra_keys"]) == len(hashes)
        parent = event["parent_block_hash"]
        assert parent is None or self._is_known(parent), "the parent is unknown"
        for i, number in enumerate(hashes):
            tokens = tuple(event["token_ids"][i * size : (i + 1) * size])
            extra = tuple(event["extra_keys"][i] or ())
            assert event["lora_name"] is None or event["lora_name"] in extra
            assert (event["lora_name"] is None) == (event["lora_id"] is None)
            known = self._hashes.setdefault((parent, tokens, extra), number)
            assert known == number, "one block has two hashes"
            media = self._cached[group][number]
            assert group in self._page_groups() or self._is_known(number), "a state of no page"
            assert event["medium"] not in media, "a block was stored twice"
            media.add(event["medium"])
            parent = number

    def _remove(self, event: dict[str, Any]) -> None:
        for number in event["block_hashes"]:
            self._cached[event["group_idx"]][number].remove(event["medium"])

    def check(self) -> None:
        """Assert that the parents of all known pages are known."""
        for (parent, _, _), number in self._hashes.items():
            if parent is not None and self._is_known(number):
                assert self._is_known(parent), "a page stayed without its parent"

    def _page_groups(self) -> list[int]:
        """Return the groups of attention layers."""
        return [group for group, kind in self._kinds.items() if kind in ATTENTION]

    def _is_known(self, number: int) -> bool:
        """Return whether a page is cached in any medium."""
        return any(self._cached[group].get(number) for group in self._page_groups())

    def _chain(self, tokens: Sequence[int], salt: str, adapter: str) -> list[int]:
        """Return the hashes of a prompt's known blocks, from its start."""
        chain: list[int] = []
        size = self._block_size
        for begin in range(0, len(tokens) - size + 1, size) if size else ():
            extra = [adapter] if adapter else []
            extra += [salt] if salt and not chain else []
            parent = chain[-1] if chain else None
            block = (parent, tuple(tokens[begin : begin + size]), tuple(extra))
            if block not in self._hashes:
                break
            chain.append(self._hashes[block])
        return chain

    def attention_match(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Return the cached tokens of a prompt in the eyes of a gateway that knows pages only."""
        groups = self._page_groups()
        count = 0
        for number in self._chain(tokens[:-1], salt, adapter):
            if not all(self._cached[group][number] for group in groups):
                break
            count += 1
        return count * self._block_size

    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Return the cached tokens of a prompt: those after which every group can resume.

        The last token is always computed. Attention needs all blocks before it, recurrent layers
        need the last one.
        """
        count = self.attention_match(tokens, salt, adapter) // max(self._block_size, 1)
        chain = self._chain(tokens[:-1], salt, adapter)
        states = [group for group, kind in self._kinds.items() if kind == "mamba"]
        while count and not all(self._cached[group][chain[count - 1]] for group in states):
            count -= 1
        return count * self._block_size
