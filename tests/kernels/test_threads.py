"""one_thread() restores the program's thread count, and products have the bits of one thread."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.kernels import row_tiles
from lockstep.kernels.attention import KV_SPLIT, paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.threads import one_thread


@pytest.fixture
def clear_probed_sizes() -> Iterator[None]:
    """Clear the probe results before and after a patched product."""
    row_tiles.probed_sizes.cache_clear()
    yield
    row_tiles.probed_sizes.cache_clear()


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Set three threads, as a program may."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_one_thread_restores_thread_count() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def reverse_products_on_threads(monkeypatch: pytest.MonkeyPatch, min_rows: int) -> None:
    """Patch mm to add in another order on several threads, from `min_rows` rows on."""
    product = torch.mm

    def mm(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() > 1 and len(x) >= min_rows:
            return product(x.flip(1), right.flip(0))
        return product(x, right)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.usefixtures("three_threads", "clear_probed_sizes")
@pytest.mark.parametrize("min_rows", [64, 2])
def test_tiled_product_has_bits_of_one_thread(
    min_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes whose bits depend on threads are not used on several; if none remains, one thread is
    used."""
    reverse_products_on_threads(monkeypatch, min_rows)
    x = torch.randn(130, 72)
    right = torch.randn(72, 48)
    with one_thread():
        sizes = row_tiles.exact_sizes(72, 48)
        alone = row_tiles.tiled_mm(x, right)
    assert max(sizes) >= 64
    fewer = tuple(size for size in sizes if size < min_rows)
    assert row_tiles.exact_sizes(72, 48) == fewer and (8 in fewer) == (min_rows == 64)
    for rows in (1, 5, 8, 64, 130):
        assert torch.equal(row_tiles.tiled_mm(x[:rows], right), alone[:rows])


@pytest.mark.usefixtures("three_threads", "clear_probed_sizes")
def test_attention_has_bits_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no size is exact on several threads, a row runs on one."""
    rows = ((400, 3), (300, 3), (40, 3))
    together = paged(rows, 4, 2, 16, 16, torch.float32)
    attend = paged_attention.backends["cpu"].run
    with one_thread():
        expected = attend(**together)
    reverse_products_on_threads(monkeypatch, 2)
    assert row_tiles.exact_sizes(16, KV_SPLIT) == ()
    assert torch.equal(attend(**together), expected)
    for row in range(len(rows)):
        tokens = slice(3 * row, 3 * row + 3)
        alone = together | {
            "q": together["q"][tokens],
            "page_table": together["page_table"][row : row + 1],
            "cu_seqlens": together["cu_seqlens"][:2],
            "starts": together["starts"][row : row + 1],
        }
        assert torch.equal(attend(**alone), expected[tokens]), "alone and in a batch"
