"""Copies to a GPU run in stream order without blocking the host."""

import pytest
import torch

from lockstep.kernels.stream_copies import copy_to_device

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000_000
"""Clock cycles of about one second."""


def test_copy_of_a_tensor_does_not_synchronize() -> None:
    x = torch.arange(1 << 22)
    to = torch.zeros_like(x, device="cuda")
    copy_to_device(x, to)  # allocates pinned memory of this size
    torch.cuda.synchronize()
    to.zero_()
    torch.cuda._sleep(CYCLES)
    copy_to_device(x, to)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert torch.equal(to.cpu(), x)


def test_fill_with_a_number_does_not_synchronize() -> None:
    to = torch.zeros(3, device="cuda")
    torch.cuda._sleep(CYCLES)
    copy_to_device(2.5, to[1])
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    assert to.tolist() == [0.0, 2.5, 0.0]
