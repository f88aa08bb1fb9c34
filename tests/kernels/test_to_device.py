"""Tensors of host memory arrive whole, one after another, however they are cut on their way."""

import pytest
import torch
from torch import Tensor

from lockstep.kernels import to_device as module
from lockstep.kernels.to_device import joined_to_device, to_device

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


def parts(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, every element another."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    every = torch.arange(sum(sizes) * dtype.itemsize).to(torch.uint8).view(dtype)
    pairs = zip(every.split(sizes), shapes, strict=True)
    return [part.view(shape) for part, shape in pairs]


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [4, 20, 64, 1 << 20])
def test_parts_lie_one_after_another(
    device: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that end within parts, at their ends, and behind them all."""
    monkeypatch.setattr(module, "PIECE", piece)
    given = parts(dtype, [(), (3, 5), (0, 4), (1,), (4, 4), (60,)])
    found = joined_to_device(given, torch.device(device))
    assert found.dtype == dtype and found.device.type == torch.device(device).type
    whole = torch.cat([part.flatten().view(torch.uint8) for part in given])
    assert torch.equal(found.cpu().view(torch.uint8), whole)


@pytest.mark.gpu
def test_a_tensor_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is used again and again, and only once the device has read it."""
    monkeypatch.setattr(module, "PIECE", 1 << 16)
    host = torch.randint(-100, 100, (3, 1 << 20))
    torch.cuda._sleep(100_000_000)
    assert torch.equal(to_device(host, torch.device("cuda")).cpu(), host)


def test_a_tensor_that_is_there_stays() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, CPU) is tensor
