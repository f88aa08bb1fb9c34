"""Backends of rms_norm with one fault each. Processes of examinations import this module."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.kernels.norm import rms_norm

FAULTS: dict[str, Callable[..., Tensor]] = {}
"""Name of a backend -> its function."""
CALLS = [0]
"""Number of calls of `unstable` and `graph` in this process."""


def fault(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register a function as a backend of rms_norm that supports everything."""
    FAULTS[run.__name__] = run
    rms_norm.backend(run.__name__, supports=lambda **traits: None)(run)
    return run


def next_ulp(y: Tensor) -> Tensor:
    """Return the next larger number of each element."""
    return torch.nextafter(y, torch.full_like(y, torch.inf))


@fault
def aborts(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    os.abort()


@fault
def segmentation_fault(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


@fault
def illegal_instruction(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    os.kill(os.getpid(), signal.SIGILL)
    raise AssertionError("unreachable")


@fault
def hangs(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if x.dim() == 3:
        time.sleep(3600)
    return rms_norm(x, weight, eps, offset)


@fault
def hangs_at_exit(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if x.dim() == 3:
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return rms_norm(x, weight, eps, offset)


@fault
def exits(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    print("out of registers", flush=True)
    os._exit(3)


@fault
def raises(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@fault
def one_ulp_at_odd_rows(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms_norm(x, weight, eps, offset)
    y[1::2] = next_ulp(y[1::2])
    return y


@fault
def right_if_blocking(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms_norm(x, weight, eps, offset)
    return y if "CUDA_LAUNCH_BLOCKING" in os.environ else next_ulp(y)


@fault
def other_bits_alone(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms_norm(x, weight, eps, offset)
    return next_ulp(y) if len(x) == 1 and x.shape[-1] == 33 else y


@fault
def unstable(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    CALLS[0] += 1
    y = rms_norm(x, weight, eps, offset)
    return next_ulp(y) if CALLS[0] == 3 else y


@fault
def writes_outside(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.copy_(rms_norm(x, weight, eps, offset))
    if y.storage_offset():  # between canaries: the write harms nothing
        y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(7.0)
    return y


@fault
def leaves_an_element(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    result = rms_norm(x, weight, eps, offset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.view(-1)[:-1] = result.view(-1)[:-1]
    return y


@fault
def changes_inputs(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = rms_norm(x, weight, eps, offset)
    weight.add_(1.0)
    return y


@fault
def wrong_shape(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return rms_norm(x, weight, eps, offset)[..., :-1]


@fault
def healthy(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return rms_norm(x, weight, eps, offset)
