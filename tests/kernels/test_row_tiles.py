"""Row tiles: a row has the same bits at any position of its tile, for any number of columns."""

import pytest
import torch

from lockstep.kernels.attention import KV_SPLIT
from lockstep.kernels.row_tiles import BASE, exact_sizes, tile_mm, tiled_bmm, tiled_mm

COLUMNS = (*range(1, 18), 40, 100)


def wide_range_numbers(*shape: int) -> torch.Tensor:
    """Return random numbers over 2^-20 .. 2^20, whose sums round differently in another order."""
    draw = torch.Generator().manual_seed(shape[-1])
    exponents = torch.randint(-20, 21, shape, generator=draw)
    return torch.randn(shape, generator=draw) * torch.exp2(exponents.float())


@pytest.mark.parametrize("columns", COLUMNS)
def test_row_bits_are_position_independent(columns: int) -> None:
    x = wide_range_numbers(BASE, 48)
    right = torch.randn(48, columns)
    expected = tile_mm(x, right)
    for index in range(BASE):
        for product in (tile_mm, tiled_mm):
            actual = product(x.roll(index, 0), right)
            assert torch.equal(actual, expected.roll(index, 0)), (index, product)


@pytest.mark.parametrize("columns", COLUMNS)
def test_batched_product_row_bits_are_position_independent(columns: int) -> None:
    """With one left operand for all products, and with one for each."""
    x = wide_range_numbers(BASE, KV_SPLIT)
    right = torch.randn(3, KV_SPLIT, columns)
    assert BASE in exact_sizes(KV_SPLIT, columns)
    actual = tiled_bmm(x, right)
    assert torch.equal(tiled_bmm(x.expand(3, *x.shape), right), actual)
    for one, mine in zip(actual, right, strict=True):
        assert torch.equal(one, tile_mm(x, mine))


@pytest.mark.parametrize("columns", COLUMNS)
def test_column_bits_are_position_independent(columns: int) -> None:
    """Fused and separate projections of one input are therefore equal."""
    x = wide_range_numbers(20, 48)
    right = torch.randn(48, columns)
    expected = tiled_mm(x, right)
    assert torch.equal(tiled_mm(x, right.flip(1)), expected.flip(1))
    for cut in range(1, columns, 3):
        parts = [tiled_mm(x, part) for part in (right[:, :cut], right[:, cut:])]
        assert torch.equal(torch.cat(parts, 1), expected)
