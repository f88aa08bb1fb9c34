"""One thread for a while: the program gets its own number back; products have one thread's bits."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.kernels import row_tiles
from lockstep.kernels.attention import KV_SPLIT, paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.threads import one_thread


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a false product is found to give is not remembered."""
    row_tiles.probed_sizes.cache_clear()
    yield
    row_tiles.probed_sizes.cache_clear()


@pytest.fixture
def three() -> Iterator[None]:
    """A program that has chosen three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three")
def test_the_program_keeps_its_number() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3


def other_order(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """A product that adds in another order on several threads, where it has so many rows."""
    product = torch.mm

    def mm(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if torch.get_num_threads() > 1 and len(x) >= least:
            return product(x.flip(1), right.flip(0))
        return product(x, right)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.usefixtures("three", "forgotten")
@pytest.mark.parametrize("least", [64, 2])
def test_a_product_has_the_bits_of_one_thread(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes whose bits the threads change do not serve on them; where none is left, one does."""
    other_order(monkeypatch, least)
    x = torch.randn(130, 72)
    right = torch.randn(72, 48)
    with one_thread():
        sizes = row_tiles.exact_sizes(72, 48)
        alone = row_tiles.tiled_mm(x, right)
    assert max(sizes) >= 64
    fewer = tuple(size for size in sizes if size < least)
    assert row_tiles.exact_sizes(72, 48) == fewer and (8 in fewer) == (least == 64)
    for rows in (1, 5, 8, 64, 130):
        assert torch.equal(row_tiles.tiled_mm(x[:rows], right), alone[:rows])


@pytest.mark.usefixtures("three", "forgotten")
def test_so_has_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no size serves on several threads, a row is done on one."""
    rows = ((400, 3), (300, 3), (40, 3))
    together = paged(rows, 4, 2, 16, 16, torch.float32)
    attend = paged_attention.backends["cpu"].run
    with one_thread():
        expected = attend(**together)
    other_order(monkeypatch, 2)
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
