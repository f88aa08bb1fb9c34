"""Integer arithmetic of launchers: the numbers of Triton's functions."""

import pytest

from lockstep.kernels.integers import ceil_div, next_power_of_2


def test_ceil_div_is_that_of_triton() -> None:
    triton = pytest.importorskip("triton")
    for a in range(70):
        for b in (1, 2, 3, 7, 64):
            assert ceil_div(a, b) == triton.cdiv(a, b)


def test_next_power_of_2_is_that_of_triton() -> None:
    triton = pytest.importorskip("triton")
    for n in range(1, 300):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
    assert next_power_of_2(0) == 1
