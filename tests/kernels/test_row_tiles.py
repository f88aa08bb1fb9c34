"""Row tiles: a row has its bits at any place of its tile, however few columns there are."""

import pytest
import torch

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.row_tiles import BASE, exact_sizes, tile_mm, tiled_bmm, tiled_mm

COLUMNS = (*range(1, 18), 40, 100)


def spread(*shape: int) -> torch.Tensor:
    """Random numbers over 2^-20 .. 2^20, whose sums round otherwise in any other order."""
    draw = torch.Generator().manual_seed(shape[-1])
    exponents = torch.randint(-20, 21, shape, generator=draw)
    return torch.randn(shape, generator=draw) * torch.exp2(exponents.float())


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_row_has_its_bits_at_any_place(columns: int) -> None:
    x = spread(BASE, 48)
    right = torch.randn(48, columns)
    expected = tile_mm(x, right)
    for place in range(BASE):
        for product in (tile_mm, tiled_mm):
            found = product(x.roll(place, 0), right)
            assert torch.equal(found, expected.roll(place, 0)), (place, product)


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_batch_of_products_has_them_too(columns: int) -> None:
    """One left operand for all, and one for each."""
    x = spread(BASE, KV_SPLIT)
    right = torch.randn(3, KV_SPLIT, columns)
    assert BASE in exact_sizes(KV_SPLIT, columns)
    found = tiled_bmm(x, right)
    assert torch.equal(tiled_bmm(x.expand(3, *x.shape), right), found)
    for one, own in zip(found, right, strict=True):
        assert torch.equal(one, tile_mm(x, own))


@pytest.mark.parametrize("columns", COLUMNS)
def test_a_column_has_its_bits_at_any_place(columns: int) -> None:
    """So that maps of one input give the same as one product and as several."""
    x = spread(20, 48)
    right = torch.randn(48, columns)
    expected = tiled_mm(x, right)
    assert torch.equal(tiled_mm(x, right.flip(1)), expected.flip(1))
    for cut in range(1, columns, 3):
        parts = [tiled_mm(x, part) for part in (right[:, :cut], right[:, cut:])]
        assert torch.equal(torch.cat(parts, 1), expected)
