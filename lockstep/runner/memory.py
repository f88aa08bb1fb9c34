"""How many pages and slots fit, and the tensors behind them."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.cache.specs import PagedSpec, StateSpec
from lockstep.config import Plan
from lockstep.errors import CapacityError
from lockstep.layers.room import Room

PAGE_SIZE = 64
CPU_CACHE_BYTES = 1 << 30


MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Tells glibc to keep what a step frees: the next step takes the same again.

    On a virtual machine every page handed back and taken again costs a fault of about 10 us: adding
    two 98 KB tensors took 291 us, and 68 us with this. Other C libraries lack it and need nothing.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MALLOC_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(MALLOC_MMAP_THRESHOLD, 32 << 20)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one page and of one slot over all layers."""

    page: int
    slot: int


def mixers(*modules: nn.Module | None) -> dict[str, nn.Module]:
    """Name -> each layer that keeps something between steps."""
    found = {}
    for prefix, root in zip(("", "draft."), modules, strict=True):
        if root is not None:
            found.update(
                {prefix + n: m for n, m in root.named_modules() if hasattr(m, "cache_spec")}
            )
    return found


def cache_bytes(layers: dict[str, nn.Module]) -> CacheBytes:
    """What one page and one slot cost."""
    specs = [layer.cache_spec() for layer in layers.values()]
    page = sum(s.page_bytes(PAGE_SIZE) for s in specs if isinstance(s, PagedSpec))
    slot = sum(s.slot_bytes for s in specs if isinstance(s, StateSpec))
    return CacheBytes(page, slot)


def check_room(room: Room, plan: Plan, vocab: int) -> None:
    """Raises CapacityError where the table, or pages and slots, do not fit into all memory."""
    line = 8 * plan.history_len + 9 * vocab + 4 * plan.row_columns
    remedy = "Lower max_num_seqs or max_model_len."
    room.take((plan.max_num_seqs + 1) * line, "the table of rows", remedy)
    cache = plan.num_pages * plan.page_bytes + plan.num_slots * plan.slot_bytes
    remedy = "Lower num_gpu_blocks, num_snapshots or max_num_seqs."
    if plan.device == "cpu":  # on a GPU it is measured what fits
        room.take(cache, "the cache", remedy)


def allocate(layers: dict[str, nn.Module], num_pages: int, num_slots: int, device: str) -> None:
    """Binds every layer to fresh storage of this many pages and slots."""
    for layer in layers.values():
        spec = layer.cache_spec()
        if isinstance(spec, PagedSpec):
            layer.bind(spec.allocate(num_pages, PAGE_SIZE, device))
        else:
            layer.bind(spec.allocate(num_slots, device))


def tensors(layers: dict[str, nn.Module], kind: type) -> list[Tensor]:
    """The bound tensors of all layers whose spec is of this kind."""
    return [
        t for m in layers.values() if isinstance(m.cache_spec(), kind) for t in m.cache_tensors()
    ]


def count_pages(budget: int, page_bytes: int, useful: int, least: int) -> int:
    """Pages that `budget` bytes hold, at most `useful`. Raises CapacityError below `least`."""
    pages = min(budget // page_bytes, useful)
    if pages < least:
        raise CapacityError(
            f"the KV cache has room for {max(pages, 0)} pages of {PAGE_SIZE} tokens "
            f"({page_bytes} bytes each); at least {least} are needed for one request of "
            "max_model_len tokens. Lower max_model_len or max_num_seqs, or raise "
            "gpu_memory_utilization."
        )
    return pages
