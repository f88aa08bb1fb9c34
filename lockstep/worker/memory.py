"""Sizes of the cache, and allocation of its tensors."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn

from lockstep.cache.specs import Cached, StorageKind, is_cached, unit_bytes
from lockstep.config import EngineConfig, StepLimits
from lockstep.errors import CapacityError
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.step import PAGE_SIZE
from lockstep.worker.transfers import BUFFERS, STAGING_BYTES

CPU_CACHE_BYTES = 1 << 30
"""Default bytes of pages on a CPU."""
SNAPSHOTS_PER_ROW = 2
"""Default snapshots of recurrent state per row."""
TOKEN_BYTES = 8
"""Bytes of the row table per token of a row: its id."""
VOCAB_BYTES = 9
"""Bytes of the row table per row and token of the vocabulary: bias, count, prompt membership."""
TOKENS_OF_A_BYTE = 8
"""Tokens of the vocabulary per byte of a grammar mask."""
COLUMN_BYTES = 4
"""Bytes of the row table per page of a row: its id."""
GIB = 1 << 30
SLAB_BYTES = GIB
"""Maximum bytes of one allocation of host memory."""
MIN_PAGES = 3
"""Minimum pages: the null page, and two for one request."""
M_TRIM_THRESHOLD = -1
"""Parameter of mallopt, from glibc's malloc.h."""
M_MMAP_THRESHOLD = -3
"""Parameter of mallopt, from glibc's malloc.h."""
KEPT_BYTES = 1 << 30
"""Freed memory that glibc keeps before it returns any to the system."""
LARGE_BYTES = 32 << 20
"""Size from which glibc maps an allocation separately: its own maximum."""


def keep_freed_memory() -> None:
    """Make glibc keep the memory that a step frees: the next step needs it again.

    On a virtual machine every page returned and taken again costs a fault of about 10 us: adding
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
    """Return name -> layer of all layers that keep data between steps."""
    layers = {}
    for prefix, root in zip(("", "draft."), modules, strict=True):
        if root is not None:
            cached = {prefix + n: m for n, m in root.named_modules() if is_cached(m)}
            layers.update(cached)
    return layers


def snapshot_every(*modules: nn.Module | None) -> int:
    """Return the pages between two snapshots of a prompt: the maximum over the models."""
    intervals = [
        getattr(m, "snapshot_every", 1) for root in modules if root for m in root.modules()
    ]
    return max(intervals)


def cache_bytes(layers: dict[str, Cached]) -> CacheBytes:
    """Return the bytes of one page and of one slot."""
    specs = [layer.cache_spec() for layer in layers.values()]
    return CacheBytes(
        *(unit_bytes(specs, kind, PAGE_SIZE) for kind in (StorageKind.PAGED, StorageKind.STATE))
    )


@dataclass(frozen=True)
class CacheSize:
    """Number of pages, the null page included; number of slots, the null slot included, or 0
    without recurrent layers.
    """

    pages: int
    slots: int


def configured_size(config: EngineConfig, limits: StepLimits, cost: CacheBytes) -> CacheSize:
    """Return the configured cache size, or what fits on a CPU. Raises CapacityError."""
    pages = config.num_gpu_blocks
    if pages is None:
        useful = limits.max_num_seqs * limits.row_columns + 1
        min_pages = min(limits.row_columns, MIN_PAGES - 1) + 1
        budget = config.kv_cache_memory_bytes or CPU_CACHE_BYTES
        pages = count_pages(budget, cost.page, useful, min_pages)
    return CacheSize(pages, _slots(limits, cost, _snapshots(config, limits)))


def _snapshots(config: EngineConfig, limits: StepLimits) -> int:
    """Return the number of snapshots: configured, or enough for prefix hits."""
    if config.num_snapshots is not None:
        return config.num_snapshots
    return SNAPSHOTS_PER_ROW * limits.max_num_seqs if config.enable_prefix_caching else 0


def _slots(limits: StepLimits, cost: CacheBytes, snapshots: int) -> int:
    """Return the null slot, one per row, and the snapshots; 0 without recurrent layers."""
    return 1 + limits.max_num_seqs + snapshots if cost.slot else 0


def host_pages(config: EngineConfig, cost: CacheBytes, budget: MemoryBudget) -> int:
    """Return the pages of the host tier; 0 without prefix caching.

    budget: budget of host memory. Raises CapacityError where one unit of each kind does not fit, or
    where the host has no such memory.
    """
    if not (config.kv_offloading_size and config.enable_prefix_caching):
        return 0
    setting = f"kv_offloading_size={config.kv_offloading_size:g}"
    size = int(config.kv_offloading_size * GIB)
    min_bytes = cost.page + -(-cost.slot // cost.page) * cost.page
    if size < min_bytes:
        raise CapacityError(
            f"{setting} GiB is not allowed; allowed: 0, or {ceil(min_bytes / GIB * 1e6) / 1e6:g} "
            f"or more: what one page takes ({cost.page} bytes), and a snapshot where layers recur "
            f"({cost.slot}). Raise it."
        )
    count = size // cost.page
    budget.take(count * cost.page, f"the host's part of the cache ({setting})", "Lower it.")
    return count


def staging_bytes(config: EngineConfig) -> int:
    """Return the device bytes of staging buffers for the host tier."""
    return BUFFERS * STAGING_BYTES if config.kv_offloading_size else 0


def host_memory(
    pages: int, page_bytes: int, device: str, slab_bytes: int = SLAB_BYTES
) -> list[Tensor]:
    """Allocate host memory [pages, page_bytes] uint8, pinned for a GPU, as a list of tensors.

    All but the last have the same length, since torch pins powers of two. slab_bytes: maximum bytes
    of one of them. Raises CapacityError.
    """
    count = max(slab_bytes // page_bytes, 1)
    sizes = [min(count, pages - first) for first in range(0, pages, count)]
    pinned = device == "cuda"
    try:
        return [torch.empty(n, page_bytes, dtype=torch.uint8, pin_memory=pinned) for n in sizes]
    except RuntimeError as error:
        raise CapacityError(
            f"the host has no {pages * page_bytes / GIB:.3g} GiB to pin for the cache: {error}. "
            "Lower kv_offloading_size."
        ) from None


def check_table(budget: MemoryBudget, limits: StepLimits, vocab: int) -> None:
    """Raise CapacityError where the row table does not fit into memory."""
    row_bytes = (
        TOKEN_BYTES * limits.history_len
        + VOCAB_BYTES * vocab
        + limits.query_len * vocab // TOKENS_OF_A_BYTE
        + COLUMN_BYTES * limits.row_columns
        + TOKEN_BYTES * limits.max_model_len * limits.has_predictions
    )
    remedy = "Lower max_num_seqs or max_model_len."
    budget.take((limits.max_num_seqs + 1) * row_bytes, "the table of rows", remedy)


def check_cache(budget: MemoryBudget, cost: CacheBytes, size: CacheSize) -> None:
    """Raise CapacityError where pages and slots do not fit into memory."""
    remedy = "Lower num_gpu_blocks, num_snapshots or max_num_seqs."
    budget.take(size.pages * cost.page + size.slots * cost.slot, "the cache", remedy)


def allocate(layers: dict[str, Cached], num_pages: int, num_slots: int, device: str) -> None:
    """Bind every layer to new storage of this many pages and slots."""
    units = {StorageKind.PAGED: num_pages, StorageKind.STATE: num_slots}
    for layer in layers.values():
        spec = layer.cache_spec()
        layer.bind(spec.allocate(units[spec.kind], PAGE_SIZE, device))


def tensors(layers: dict[str, Cached], kind: StorageKind) -> list[Tensor]:
    """Return the bound tensors of all layers with this storage kind."""
    return [t for m in layers.values() if m.cache_spec().kind is kind for t in m.cache_tensors()]


def count_pages(budget: int, page_bytes: int, useful: int, min_pages: int) -> int:
    """Return the pages that fit into `budget` bytes, at most `useful`.

    Raises CapacityError below `min_pages`.
    """
    pages = min(budget // page_bytes, useful)
    if pages < min_pages:
        raise CapacityError(
            f"the KV cache has room for {max(pages, 0)} pages of {PAGE_SIZE} tokens "
            f"({page_bytes} bytes each); at least {min_pages} are needed: the null page, and "
            "those of a request. Lower max_num_seqs, max_num_batched_tokens or max_model_len, "
            "choose a kv_cache_dtype of fewer bytes, or raise gpu_memory_utilization."
        )
    return pages
