"""Prepacked CPU weights give equal bits for any number of rows, position of a row, and slice of
N."""

import pytest
import torch

from lockstep.kernels.linear import linear
from lockstep.kernels.linear.cpu import linear_cpu
from lockstep.kernels.linear.prepacked import BASE, SIZES, LibraryWeight
from lockstep.kernels.threads import one_thread

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 48), (5, 48), (16, 33), (40, 64), (576, 576), (100, 1536)]


def wide_range_rows(rows: int, k: int) -> torch.Tensor:
    """Return x [rows, k] over 2^-6 .. 2^6, for which another order of additions rounds to other
    bits."""
    generator = torch.Generator().manual_seed(k)
    exponents = torch.randint(-6, 7, (rows, k), generator=generator)
    return torch.randn(rows, k, generator=generator) * torch.exp2(exponents.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_prepacked_row_is_batch_independent(n: int, k: int, dtype: torch.dtype) -> None:
    x = wide_range_rows(70, k).to(dtype)
    weight = LibraryWeight(torch.randn(n, k).to(dtype))
    expected = linear(x, weight)
    assert expected.shape == (70, n)
    assert torch.equal(linear_cpu(x, weight), expected)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        for begin in (0, 1, 70 - rows):
            part = linear_cpu(x[begin : begin + rows], weight)
            assert torch.equal(part, expected[begin : begin + rows]), (rows, begin)
    assert linear_cpu(x[:0], weight).shape == (0, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepacked_output_is_independent_of_weight_slice(dtype: torch.dtype) -> None:
    """A fused weight equals its parts, and a rank's slice equals that part of the whole."""
    x = wide_range_rows(BASE, 640).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for draw in range(30):  # two orders of additions often round to the same bits
        weight = torch.randn(96, 640, generator=generator).to(dtype)
        expected = linear(x, LibraryWeight(weight))
        for begin, end in ((0, 1), (0, 8), (3, 20), (16, 48), (48, 96), (95, 96), (0, 95)):
            part = linear_cpu(x, LibraryWeight(weight[begin:end]))
            assert torch.equal(part, expected[:, begin:end]), (draw, begin, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepacked_weight_unpacks_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(21, 40).to(dtype)
    prepacked = LibraryWeight(weight)
    assert torch.equal(prepacked.plain(), weight)
    assert torch.equal(prepacked.rows(3, 9), weight[3:9])


def test_prepacked_linear_values() -> None:
    x, weight = torch.randn(9, 300), torch.randn(50, 300)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(linear(x, LibraryWeight(weight)), expected, rtol=1e-4, atol=1e-4)


def test_inexact_row_counts_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM sums 1 and 2 rows in another order, so they run as 3 rows. A product for which every
    size differs on several threads runs on one."""
    weight = LibraryWeight(torch.randn(32, 64))
    x = wide_range_rows(1, 64)
    expected = linear(x, weight)
    seen: list[int] = []
    product = weight.product
    monkeypatch.setattr(weight, "product", lambda x: seen.append(len(x)) or product(x))
    monkeypatch.setattr(weight, "exact_sizes", lambda: (3, BASE))
    assert torch.equal(weight.mm(x), expected)
    assert torch.equal(weight.mm(x.expand(20, -1)), expected.expand(20, -1))
    assert seen == [3, BASE, BASE, BASE]
    many = lambda: () if torch.get_num_threads() > 1 else (BASE,)  # noqa: E731
    monkeypatch.setattr(weight, "exact_sizes", many)
    torch.set_num_threads(2)
    try:
        assert torch.equal(weight.mm(x), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_thread_count_changes_no_bit(dtype: torch.dtype) -> None:
    x = wide_range_rows(SIZES[-1] + 5, 576).to(dtype)
    weight = LibraryWeight(torch.randn(960, 576).to(dtype))
    with one_thread():
        expected = linear_cpu(x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows in (1, 8, len(x)):
            assert torch.equal(linear_cpu(x[:rows], weight), expected[:rows])
    finally:
        torch.set_num_threads(before)
