"""Programmatic dependent launch: a kernel of a step may start while the one in front of it ends.

Every kernel that is launched so calls `follow` before it touches anything that a kernel before it
wrote, or that one may still read: the wait ends when the kernel in front, and with it all before
that one, has finished. What it loads earlier must be constant: weights. No bit depends on it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

FIRST_CAPABILITY = 9


@triton.jit
def follow(PDL: tl.constexpr) -> None:
    """Lets the next kernel start, then waits for the one in front."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@cache
def _serves(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= FIRST_CAPABILITY


def chained(x: Tensor) -> dict[str, Any]:
    """The launch options of a kernel that follows, on the device of x."""
    on = _serves(x.device)
    return dict(PDL=on, launch_pdl=True) if on else dict(PDL=False)
