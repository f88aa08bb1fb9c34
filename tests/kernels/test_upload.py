"""Uploads of host tensors: every byte arrives in order, for any chunk size."""

import pytest
import torch
from torch import Tensor

from lockstep.kernels import upload as module
from lockstep.kernels.upload import upload, upload_concatenated

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8)


def parts(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return tensors of these shapes with distinct bytes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    values = torch.arange(sum(sizes) * dtype.itemsize).to(torch.uint8).view(dtype)
    pairs = zip(values.split(sizes), shapes, strict=True)
    return [part.view(shape) for part, shape in pairs]


@pytest.mark.parametrize("device", [CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [4, 20, 64, 1 << 20])
def test_parts_are_concatenated(
    device: str, dtype: torch.dtype, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end within parts, at ends of parts and after the last part."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    tensors = parts(dtype, [(), (3, 5), (0, 4), (1,), (4, 4), (60,)])
    uploaded = upload_concatenated(tensors, torch.device(device))
    assert uploaded.dtype == dtype and uploaded.device.type == torch.device(device).type
    full = torch.cat([part.flatten().view(torch.uint8) for part in tensors])
    assert torch.equal(uploaded.cpu().view(torch.uint8), full)


@pytest.mark.gpu
def test_upload_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging buffers are reused only after the device has read them."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 16)
    host = torch.randint(-100, 100, (3, 1 << 20))
    torch.cuda._sleep(100_000_000)
    assert torch.equal(upload(host, torch.device("cuda")).cpu(), host)


def test_tensor_on_the_device_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert upload(tensor, CPU) is tensor
