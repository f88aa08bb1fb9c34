"""exchange: every backend returns all ranks' columns in order, over tensors of equal shape."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.backends import load, load_cases
from lockstep.kernels.exchange import ALONE, exchange, exchange_add_rms_norm
from lockstep.kernels.exchange.cases import needed_columns
from lockstep.kernels.exchange.group import DryGroup
from lockstep.kernels.norm import add_rms_norm
from tests.thread_ranks import ThreadGroup, run_ranks

load()
BACKENDS = ("reference", "cpu")
INTEGERS = {2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_in_the_order_of_the_ranks(backend: str, dtype: torch.dtype) -> None:
    for name, arguments in load_cases(exchange)(dtype):
        expected = torch.cat(arguments["group"].parts, dim=1)
        actual = exchange.backends[backend].run(**arguments)
        assert actual.dtype == dtype and actual.shape == expected.shape, name
        read = needed_columns(arguments.get("needed"), arguments["widths"], len(expected))
        integer = INTEGERS[dtype.itemsize]
        assert torch.equal(actual.view(integer)[read], expected.view(integer)[read]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_adds_the_columns_of_all_ranks(backend: str, dtype: torch.dtype) -> None:
    for name, arguments in load_cases(exchange_add_rms_norm)(dtype):
        delta = torch.cat(arguments["group"].parts, dim=1)
        expected = add_rms_norm(arguments["x"], delta, arguments["weight"], 1e-6, 1.0)
        actual = exchange_add_rms_norm.backends[backend].run(**arguments)
        assert all(map(torch.equal, map(bits, actual), map(bits, expected))), name


@pytest.mark.parametrize("widths", [(16, 16), (24, 16, 16), (8, 8, 8, 8)], ids=str)
def test_every_rank_gets_the_same_columns(widths: tuple[int, ...]) -> None:
    full = torch.randn(5, sum(widths))

    def run(group: ThreadGroup) -> Tensor:
        local: Any = full.split(widths, dim=1)[group.index]
        return exchange.backends["cpu"].run(local, widths, group)

    assert all(torch.equal(actual, full) for actual in run_ranks(len(widths), run))


def test_a_single_rank_has_all_columns() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(exchange(x, (8,), ALONE), x)


def test_a_dry_group_knows_shapes() -> None:
    actual = exchange(torch.empty(3, 16, device="meta"), (24, 16, 16), DryGroup(1, 3))
    assert actual.shape == (3, 56)


@pytest.mark.parametrize("op", [exchange, exchange_add_rms_norm])
def test_the_device_decides_the_library(op: Any) -> None:
    assert op.choose(device="cpu", ranks=2, peer_access=False) == "cpu"
    assert op.choose(device="cuda", ranks=2, peer_access=False) == "nccl"
    assert op.choose(device="cuda", ranks=2, peer_access=True) == "push"
