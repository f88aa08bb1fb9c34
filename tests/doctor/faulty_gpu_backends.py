"""Backends of rms_norm with one fault each, which run on a GPU. Processes of examinations import
this module."""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.norm import rms_norm
from tests.doctor.faulty_backends import fault, next_ulp

HEALTHY = rms_norm.backends["triton"].run
FAR = 1 << 46
"""Bytes from an output to an address that no allocation has."""
OTHER_SIZE = 1024
"""Rows and columns of the product that `races` computes: some 10 us on an idle H200. Under the load
of a second stream it waits for some 200 us."""
RACE_CYCLES = 120_000
"""Clock cycles that `races` gives its other stream: some 65 us."""


@triton.jit
def store_far_kernel(y_ptr, far):
    tl.store(y_ptr + far, 0.0)


@triton.jit
def trap_kernel(y_ptr):
    one = tl.full((1,), 1, tl.int32)
    tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [one], tl.int32, False, 1)


@triton.jit
def wait_kernel(flag_ptr):
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


@fault
def gpu_illegal_address(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    store_far_kernel[(1,)](y, FAR)
    return y


@fault
def gpu_traps(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    trap_kernel[(1,)](y)
    return y


@fault
def gpu_hangs(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Wait on the device for a flag that is never set."""
    wait_kernel[(1,)](torch.zeros(1, dtype=torch.int32, device=x.device))
    return HEALTHY(x, weight, eps, offset)


@fault
def gpu_aborts(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    HEALTHY(x, weight, eps, offset)
    os.abort()


@fault
def gpu_one_ulp_at_odd_rows(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    y[1::2] = next_ulp(y[1::2])
    return y


@fault
def gpu_other_bits_alone(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    return next_ulp(y) if len(x) == 1 else y


@fault
def gpu_wrong_numbers(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return HEALTHY(x, weight, eps, offset + 0.25)


@fault
def gpu_changes_inputs(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    weight.add_(1.0)
    return y


@fault
def gpu_writes_outside(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.copy_(HEALTHY(x, weight, eps, offset))
    if y.storage_offset():  # between canaries: the write harms nothing
        y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(7.0)
    return y


@fault
def gpu_leaves_an_element(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Write all elements but the last, whose memory mostly has the value of the call before."""
    result = HEALTHY(x, weight, eps, offset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y.view(-1)[:-1] = result.view(-1)[:-1]
    return y


@fault
def gpu_wrong_from_a_graph(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    return y + 1.0 if torch.cuda.is_current_stream_capturing() else y


@fault
def gpu_waits_for_the_host(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    y = HEALTHY(x, weight, eps, offset)
    torch.cuda.current_stream().synchronize()
    return y


@fault
def gpu_races(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute on another stream, and wait for some time instead of the stream.

    Without load the time is enough, and with blocking launches too.
    """
    if torch.cuda.is_current_stream_capturing():
        return HEALTHY(x, weight, eps, offset)
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    a = torch.empty(OTHER_SIZE, OTHER_SIZE, dtype=torch.float16, device=x.device)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.mm(a, a)
        y.copy_(HEALTHY(x, weight, eps, offset))
    torch.cuda._sleep(RACE_CYCLES)
    return y


@fault
def gpu_healthy(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return HEALTHY(x, weight, eps, offset)
