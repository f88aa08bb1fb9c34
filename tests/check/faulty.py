"""A fault that a check must see."""

import pytest
import torch
from torch import Tensor

from lockstep.layers.linear import Head


def off_by_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One logit of a step's last row is off by one bit where a step has several rows."""
    forward = Head.forward

    def faulty(self: Head, x: Tensor) -> Tensor:
        out = forward(self, x).clone()
        if out.shape[0] > 1:
            out.view(torch.int32)[-1, -1] ^= 1
        return out

    monkeypatch.setattr(Head, "forward", faulty)
