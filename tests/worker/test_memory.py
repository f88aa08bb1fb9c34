"""Host memory of the cache: its size, its errors, and its allocation."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import CapacityError
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.worker.memory import GIB, CacheBytes, host_memory, host_pages

COST = CacheBytes(page=1000, slot=20000)


def config(**settings: Any) -> Any:
    """Return the settings that host_pages reads."""
    return SimpleNamespace(
        num_snapshots=None, enable_prefix_caching=True, max_num_seqs=1, **settings
    )


@pytest.mark.parametrize(
    ("size", "pages"), [(0.0, 0), (21_000 / GIB, 21), (21_999 / GIB, 21), (1.0, 1_073_741)]
)
def test_host_pages_are_whole(size: float, pages: int) -> None:
    assert host_pages(config(kv_offloading_size=size), COST, MemoryBudget("cpu")) == pages


@pytest.mark.parametrize(
    ("size", "message"),
    [(20_999 / GIB, r"allowed: 0, or 2e-05 or more.*1000 bytes.*20000"), (2.0**19, "Lower it")],
)
def test_host_memory_too_small_or_unavailable(size: float, message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        host_pages(config(kv_offloading_size=size), COST, MemoryBudget("cpu"))


def test_host_memory_is_allocated_in_slabs() -> None:
    def shapes(pages: int, page_bytes: int) -> list[tuple[int, ...]]:
        return [tuple(t.shape) for t in host_memory(pages, page_bytes, "cpu", slab_bytes=1024)]

    assert shapes(8, 300) == [(3, 300), (3, 300), (2, 300)]
    assert shapes(2, 2000) == [(1, 2000), (1, 2000)]
    assert host_memory(0, 300, "cpu") == []


def test_host_memory_pinning_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*shape: int, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("lockstep.worker.memory.torch.empty", refuse)
    message = "no 2.79e-07 GiB to pin for the cache: out of memory. Lower kv_offloading_size"
    with pytest.raises(CapacityError, match=message):
        host_memory(1, 300, "cpu")
