"""A fault that a check must detect."""

import pytest
import torch
from torch import Tensor

from lockstep.layers.linear import Head


def flip_last_logit_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip one bit of a logit of the last row in every step that has several rows."""
    forward = Head.forward

    def faulty(self: Head, x: Tensor) -> Tensor:
        out = forward(self, x).clone()
        if out.shape[0] > 1:
            out.view(torch.int32)[-1, -1] ^= 1
        return out

    monkeypatch.setattr(Head, "forward", faulty)
