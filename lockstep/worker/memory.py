"""How many pages and slots fit, and the tensors behind them."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from lockstep.cache.specs import Cached, Law, is_cached, unit_bytes
from lockstep.config import EngineConfig, StepLimits
from lockstep.errors import CapacityError
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.step import PAGE_SIZE
from lockstep.worker.transfers import BUFFERS, STAGING_BYTES

CPU_CACHE_BYTES = 1 << 30
"""Of pages on a CPU, where nobody says how many."""
SNAPSHOTS_PER_ROW = 2
"""Snapshots of recurrent state, where nobody says how many."""
TOKEN_BYTES = 8
"""Of the table, per token of a row: its id."""
VOCAB_BYTES = 9
"""Of the table, per row and token of the vocabulary: bias, count, and whether the prompt has it."""
TOKENS_OF_A_BYTE = 8
"""Of the table, tokens of the vocabulary whether which may come one byte says, per token decided in
a step."""
COLUMN_BYTES = 4
"""Of the table, per page of a row: its number."""
GIB = 1 << 30
SLAB_BYTES = GIB
"""Of host memory that is taken at once, at most."""
LEAST_PAGES = 3
"""The null page, and two for one request."""
M_TRIM_THRESHOLD = -1
"""mallopt's name, from glibc's malloc.h."""
M_MMAP_THRESHOLD = -3
"""mallopt's name, from glibc's malloc.h."""
KEPT_BYTES = 1 << 30
"""Freed memory that is kept before any goes back to the system."""
LARGE_BYTES = 32 << 20
"""Bytes from which a tensor is mapped by itself: glibc's own maximum."""


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees: the next step takes the same again.

    On a virtual machine every page handed back and taken again costs a fault of about 10 us: adding
    two 98 KB tensors took 291 us, and 68 us with this. Other C libraries lack it and need nothing.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one page and of one slot over all layers."""

    page: int
    slot: int


def mixers(*modules: nn.Module | None) -> dict[str, Cached]:
    """Name -> each layer that keeps something between steps."""
    found = {}
    for prefix, root in zip(("", "draft."), modules, strict=True):
        if root is not None:
            own = {prefix + n: m for n, m in root.named_modules() if is_cached(m)}
            found.update(own)
    return found


def snapshot_every(*modules: nn.Module | None) -> int:
    """Pages of a prompt between two snapshots: the most that a model among these asks for."""
    found = [getattr(m, "snapshot_every", 1) for root in modules if root for m in root.modules()]
    return max(found)


def cache_bytes(layers: dict[str, Cached]) -> CacheBytes:
    """What one page and one slot cost."""
    specs = [layer.cache_spec() for layer in layers.values()]
    return CacheBytes(*(unit_bytes(specs, law, PAGE_SIZE) for law in (Law.PAGED, Law.STATE)))


@dataclass(frozen=True)
class CacheSize:
    """Pages, the null page included; slots, the null slot included, or 0 where no layer recurs."""

    pages: int
    slots: int


def asked_size(config: EngineConfig, limits: StepLimits, cost: CacheBytes) -> CacheSize:
    """The cache as the config says, or as a CPU has room for. Raises CapacityError."""
    pages = config.num_gpu_blocks
    if pages is None:
        useful = limits.max_num_seqs * limits.row_columns + 1
        least = min(limits.row_columns, LEAST_PAGES - 1) + 1
        budget = config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        pages = count_pages(budget, cost.page, useful, least)
    return CacheSize(pages, _slots(limits, cost, _snapshots(config, limits)))


def _snapshots(config: EngineConfig, limits: StepLimits) -> int:
    """Return the number of snapshots: the config's, or as many as prefix hits may need."""
    if config.num_snapshots is not None:
        return config.num_snapshots
    return SNAPSHOTS_PER_ROW * limits.max_num_seqs if config.enable_prefix_caching else 0


def _slots(limits: StepLimits, cost: CacheBytes, snapshots: int) -> int:
    """The null slot, one for each row, and the snapshots; none where no layer recurs."""
    return 1 + limits.max_num_seqs + snapshots if cost.slot else 0


def host_pages(config: EngineConfig, cost: CacheBytes, room: MemoryBudget) -> int:
    """Pages that the host keeps of what is evicted; none where nothing is found again. room: the
    host's. Raises CapacityError where not even one of all that a hit needs has room, or where the
    host has no such memory."""
    if not (config.kv_offloading_size and config.enable_prefix_caching):
        return 0
    asked = f"kv_offloading_size={config.kv_offloading_size:g}"
    size = int(config.kv_offloading_size * GIB)
    least = cost.page + -(-cost.slot // cost.page) * cost.page
    if size < least:
        raise CapacityError(
            f"{asked} GiB is not allowed; allowed: 0, or {ceil(least / GIB * 1e6) / 1e6:g} or "
            f"more: what one page takes ({cost.page} bytes), and a snapshot where layers recur "
            f"({cost.slot}). Raise it."
        )
    count = size // cost.page
    room.take(count * cost.page, f"the host's part of the cache ({asked})", "Lower it.")
    return count


def staging_bytes(config: EngineConfig) -> int:
    """Of the device, for what is on its way to host memory and back where it is to move often."""
    return BUFFERS * STAGING_BYTES if config.kv_offloading_size else 0


def host_memory(pages: int, page_bytes: int, device: str) -> list[Tensor]:
    """Host memory [pages, page_bytes] uint8, such as the device copies from and to beside its
    steps; in tensors one after the other, all but the last as long as the first, since torch pins
    powers of two. Raises CapacityError."""
    count = max(SLAB_BYTES // page_bytes, 1)
    sizes = [min(count, pages - first) for first in range(0, pages, count)]
    pinned = device == "cuda"
    try:
        return [torch.empty(n, page_bytes, dtype=torch.uint8, pin_memory=pinned) for n in sizes]
    except RuntimeError as error:
        raise CapacityError(
            f"the host has no {pages * page_bytes / GIB:.3g} GiB to pin for the cache: {error}. "
            "Lower kv_offloading_size."
        ) from None


def check_table(room: MemoryBudget, limits: StepLimits, vocab: int) -> None:
    """Raises CapacityError where the table of rows does not fit into all memory."""
    row_bytes = (
        TOKEN_BYTES * limits.history_len
        + VOCAB_BYTES * vocab
        + limits.query_len * vocab // TOKENS_OF_A_BYTE
        + COLUMN_BYTES * limits.row_columns
    )
    remedy = "Lower max_num_seqs or max_model_len."
    room.take((limits.max_num_seqs + 1) * row_bytes, "the table of rows", remedy)


def check_cache(room: MemoryBudget, cost: CacheBytes, size: CacheSize) -> None:
    """Raises CapacityError where pages and slots do not fit into all memory."""
    remedy = "Lower num_gpu_blocks, num_snapshots or max_num_seqs."
    room.take(size.pages * cost.page + size.slots * cost.slot, "the cache", remedy)


def allocate(layers: dict[str, Cached], num_pages: int, num_slots: int, device: str) -> None:
    """Binds every layer to fresh storage of this many pages and slots."""
    units = {Law.PAGED: num_pages, Law.STATE: num_slots}
    for layer in layers.values():
        spec = layer.cache_spec()
        layer.bind(spec.allocate(units[spec.law], PAGE_SIZE, device))


def tensors(layers: dict[str, Cached], law: Law) -> list[Tensor]:
    """The bound tensors of all layers under this law."""
    return [t for m in layers.values() if m.cache_spec().law is law for t in m.cache_tensors()]


def count_pages(budget: int, page_bytes: int, useful: int, least: int) -> int:
    """Return the pages that `budget` bytes hold, at most `useful`. Raises CapacityError below
    `least`."""
    pages = min(budget // page_bytes, useful)
    if pages < least:
        raise CapacityError(
            f"the KV cache has room for {max(pages, 0)} pages of {PAGE_SIZE} tokens "
            f"({page_bytes} bytes each); at least {least} are needed: the null page, and "
            "those of a request. Lower max_num_seqs, max_num_batched_tokens or max_model_len, "
            "choose a kv_cache_dtype of fewer bytes, or raise gpu_memory_utilization."
        )
    return pages
