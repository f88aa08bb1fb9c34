"""CompileTarget: the GPU that a kernel is compiled for, as far as its source depends on it."""

from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

from lockstep.kernels import architecture
from lockstep.kernels.device.dequantize import e4m3_to_fp32

NATIVE_FP8 = 89
"""First architecture with a cvt instruction that reads e4m3."""
ASYNC_MMA = 90
"""First architecture with wgmma or tcgen05, whose left operand Triton does not widen in kWidth."""
CONSUMER_BLACKWELL = 120
"""From here on architectures have mma.sync alone again."""


def uses_mma_sync(arch: int) -> bool:
    """Return whether mma.sync is the only matrix instruction of an architecture."""
    return arch < ASYNC_MMA or arch >= CONSUMER_BLACKWELL


@dataclass(frozen=True)
class CompileTarget:
    """GPU that a kernel is compiled for.

    arch: compute capability, e.g. 90. inline_ptx: whether inline assembly may be used; Triton's
    interpreter has none. num_sms: multiprocessors of the GPU.
    """

    arch: int
    inline_ptx: bool
    num_sms: int = architecture.H100_MULTIPROCESSORS

    @property
    def opaque(self) -> bool:
        """Return whether dequantized tiles must hide their joins from the compiler.

        See formats/weights/dequantize_tile.py.
        """
        return self.inline_ptx and uses_mma_sync(self.arch)


def compile_target(device: torch.device) -> CompileTarget:
    """Return the target of kernels that are launched on a device.

    Under Triton's interpreter nothing is compiled; a planned GPU (architecture.planned_for) counts
    as one that compiles.
    """
    compiled = isinstance(e4m3_to_fp32, JITFunction) or architecture.is_architecture_assumed()
    return CompileTarget(
        architecture.sm_number(device), compiled, architecture.multiprocessor_count(device)
    )
