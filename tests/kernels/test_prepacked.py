"""Prepacked weights of a CPU: equal bits for any number of rows, place of a row, and cut of N."""

import pytest
import torch

from lockstep.kernels.linear import linear
from lockstep.kernels.linear.cpu import linear_cpu
from lockstep.kernels.linear.prepacked import BASE, SIZES, PrepackedWeight
from lockstep.kernels.threads import one_thread

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 48), (5, 48), (16, 33), (40, 64), (576, 576), (100, 1536)]


def spread(rows: int, k: int) -> torch.Tensor:
    """Return x [rows, k] over 2^-6 .. 2^6: another order of additions rounds to other bits."""
    generator = torch.Generator().manual_seed(k)
    exponents = torch.randint(-6, 7, (rows, k), generator=generator)
    return torch.randn(rows, k, generator=generator) * torch.exp2(exponents.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    x = spread(70, k).to(dtype)
    weight = PrepackedWeight(torch.randn(n, k).to(dtype))
    expected = linear(x, weight)
    assert expected.shape == (70, n)
    assert torch.equal(linear_cpu(x, weight), expected)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        for begin in (0, 1, 70 - rows):
            part = linear_cpu(x[begin : begin + rows], weight)
            assert torch.equal(part, expected[begin : begin + rows]), (rows, begin)
    assert linear_cpu(x[:0], weight).shape == (0, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_output_has_the_same_bits_in_any_cut_of_the_weight(dtype: torch.dtype) -> None:
    """A fused weight gives what its parts give, and a rank's slice what the whole gives."""
    x = spread(BASE, 640).to(dtype)
    weight = torch.randn(96, 640).to(dtype)
    expected = linear(x, PrepackedWeight(weight))
    for begin, end in ((0, 1), (0, 8), (3, 20), (16, 48), (48, 96), (95, 96), (0, 95)):
        part = linear_cpu(x, PrepackedWeight(weight[begin:end]))
        assert torch.equal(part, expected[:, begin:end]), (begin, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_weight_comes_back(dtype: torch.dtype) -> None:
    weight = torch.randn(21, 40).to(dtype)
    prepacked = PrepackedWeight(weight)
    assert torch.equal(prepacked.plain(), weight)
    assert torch.equal(prepacked.rows(3, 9), weight[3:9])


def test_values_are_those_of_a_product() -> None:
    x, weight = torch.randn(9, 300), torch.randn(50, 300)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(linear(x, PrepackedWeight(weight)), expected, rtol=1e-4, atol=1e-4)


def test_sizes_that_differ_from_the_base_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM sums 1 and 2 rows in another order: they go as 3 rows. A product whose sizes all
    differ on several threads goes on one."""
    weight = PrepackedWeight(torch.randn(32, 64))
    x = spread(1, 64)
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
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x = spread(SIZES[-1] + 5, 576).to(dtype)
    weight = PrepackedWeight(torch.randn(960, 576).to(dtype))
    with one_thread():
        expected = linear_cpu(x, weight)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows in (1, 8, len(x)):
            assert torch.equal(linear_cpu(x[:rows], weight), expected[:rows])
    finally:
        torch.set_num_threads(before)
