"""What a kernel is given of a packed weight: its tensors and its layout as constants."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from lockstep.kernels import architecture
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK, Form, Operand, load_tile
from lockstep.kernels.formats.weights.gguf import SUPERBLOCK, TABLE_ZERO, GgufWeight
from lockstep.kernels.formats.weights.weights import (
    FP4_GROUP,
    Fp4Weight,
    Fp8Weight,
    IntWeight,
    QuantizedWeight,
)

KINDS = {IntWeight: 1, Fp8Weight: 2, Fp4Weight: 3, GgufWeight: 4}
FAST = {
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float16, torch.float16): 1,
    (torch.float16, torch.bfloat16): 2,
}
"""(dtype of the scales, of the model) -> how 4-bit integers are unpacked by inline assembly."""
E4M3 = 3
E2M1 = 4
IN_PARTS = 5
BY_WORD = 6
NATIVE_FP8 = 89
"""The first architecture with an instruction that reads e4m3."""
ASYNC_MMA = 90
"""The first one whose products read their left operand without mma.sync's widening of kWidth."""
LATER_MMA_SYNC = 120
"""A later one that has mma.sync again."""
TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def multiplies_by_mma_sync(arch: int) -> bool:
    """Whether an architecture has no product that reads its left operand without widening."""
    return arch < ASYNC_MMA or arch >= LATER_MMA_SYNC


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for. assembly: whether it may hold any; arch: e.g. 90; processors:
    multiprocessors of the GPU."""

    arch: int
    assembly: bool
    processors: int = architecture.H100_MULTIPROCESSORS

    @property
    def opaque(self) -> bool:
        """Whether unpacked tiles must hide their joins. See _device."""
        return self.assembly and multiplies_by_mma_sync(self.arch)


def target_of(device: torch.device) -> Target:
    """Return what kernels are compiled for; under the interpreter nothing is,
    but what is planned for a GPU."""
    compiled = isinstance(load_tile, JITFunction) or architecture.is_architecture_assumed()
    return Target(
        architecture.sm_number(device), compiled, architecture.multiprocessor_count(device)
    )


def group_of(weight: QuantizedWeight) -> int:
    """Columns that share a scale, 0 for all of them."""
    if isinstance(weight, Fp4Weight):
        return FP4_GROUP
    group = weight.group if isinstance(weight, IntWeight | GgufWeight) else _block_k(weight)
    return 0 if group >= weight.k else group


def _block_k(weight: QuantizedWeight) -> int:
    assert isinstance(weight, Fp8Weight)
    return weight.block_k


def irregular(weight: QuantizedWeight) -> bool:
    """Whether scales do not lie as load_tile reads them: by g_idx, or in groups that are neither
    multiples of a block of the words' order nor parts of it. Such a weight is unpacked ahead."""
    if isinstance(weight, IntWeight) and weight.g_idx is not None:
        return True
    group = group_of(weight)
    least = 16 if weight.bits == 8 or isinstance(weight, Fp4Weight | GgufWeight) else 32
    whole = int(BLOCK)
    return bool(group and group % whole and (whole % group or group < least))


def columns_of(weight: QuantizedWeight, columns: int, length: int) -> int:
    """Columns of a tile: `columns`, or one block where they do not divide the `length` of a chain,
    or hold neither whole groups nor a part of one."""
    group = group_of(weight)
    holds = group == 0 or columns % group == 0 or group % columns == 0
    return columns if holds and length % columns == 0 else int(BLOCK)


def shared_by(
    rows: int, tokens: int, columns: int, weight: QuantizedWeight, sync: bool
) -> tuple[int, int]:
    """Shared memory of a tile, in bytes: of a stage, and beside the stages that wait.

    rows: of the weight; x is of 16 bits. A stage holds words, each row's scales and zeros, and x.
    Beside them x lies once more, since a product reads it there; by mma.sync (`sync`) the unpacked
    tile passes through too.
    """
    x = 2 * tokens * columns
    row = columns * weight.bits // 8
    group = group_of(weight)
    if group:
        scales = weight.tensors()["scales"]
        row += -(-columns // group) * scales.element_size() * (1 + _has_second(weight))
    if isinstance(weight, GgufWeight):
        row += columns * weight.type.high_bits // 8
        if weight.bases is not None:
            row += -(-columns // SUPERBLOCK) * 2 * (1 + _has_second(weight))
    return rows * row + x, x + 2 * rows * columns * sync


def _has_second(weight: QuantizedWeight) -> bool:
    """Return whether each scale comes with a zero point or a minimum."""
    return not {"zeros", "minima"}.isdisjoint(weight.tensors())


def stages_of(
    stages: int, rows: int, tokens: int, columns: int, weight: QuantizedWeight, arch: int,
    sync: bool = False,
) -> int:  # fmt: skip
    """Stages of such a tile on an architecture: `stages`, or as many as fit. See shared_by; sync:
    mma.sync multiplies, as it does anyway on some."""
    sync = sync or multiplies_by_mma_sync(arch)
    return architecture.fit_stages(stages, *shared_by(rows, tokens, columns, weight, sync), arch)


def plain_operand(weight: Tensor) -> tuple[Operand, Form]:
    """What load_tile takes of a weight [..., K] that is not packed, K its last dimension."""
    return Operand(weight, stride=weight.stride(-2)), Form()


def operand_of(
    weight: QuantizedWeight, dtype: torch.dtype, columns: int, target: Target
) -> tuple[Operand, Form]:
    """What load_tile takes of a weight that is not irregular, for tiles of `columns`; 0: scales are
    read one at a time."""
    group = group_of(weight)
    zeros = weight.zeros if isinstance(weight, IntWeight) else None
    if isinstance(weight, GgufWeight):
        zeros = weight.minima
    scales: Tensor = weight.tensors()["scales"]
    few = columns > 0 and columns in (group, 2 * group, 4 * group) and not irregular(weight)
    paired = few and _pairs(scales) and (zeros is None or _pairs(zeros))
    rows = 1
    first = 0
    if isinstance(weight, Fp8Weight):
        whole = weight.scales.shape[0] == 1
        rows = 0 if whole and weight.shape[0] > 1 else weight.block_n
        first = weight.first
    form = Form(
        kind=KINDS[type(weight)],
        bits=weight.bits,
        group=group,
        rows=rows,
        paired=paired,
        scale=TYPES[scales.dtype],
        fast=_fast(weight, scales.dtype, dtype, target),
        opaque=target.opaque,
    )
    if paired:
        scales = scales.view(torch.int32)
        zeros = None if zeros is None else zeros.view(torch.int32)
    factors = weight.factors if isinstance(weight, Fp4Weight) else None
    operand = Operand(
        weight.words, scales, zeros, factors, weight.words.stride(0), scales.stride(0), first
    )
    if isinstance(weight, GgufWeight):
        return _gguf_operand(weight, operand), _gguf_form(weight, form)
    return operand, form


def _gguf_operand(weight: GgufWeight, operand: Operand) -> Operand:
    """Add what only a GgufWeight has."""
    return operand._replace(
        high=weight.high,
        high_stride=None if weight.high is None else weight.high.stride(0),
        bases=weight.bases,
        min_bases=weight.min_bases,
        base_stride=None if weight.bases is None else weight.bases.stride(0),
    )


def _gguf_form(weight: GgufWeight, form: Form) -> Form:
    """Add the constants of a type's arithmetic."""
    kind = weight.type
    if kind.table is not None:
        low, high = kind.table_words()
        form = form._replace(table_low=low, table_high=high)
    zero = kind.zero if kind.table is None else TABLE_ZERO
    return form._replace(high=kind.high_bits, zero=zero, steps=kind.steps)


def _pairs(numbers: Tensor) -> bool:
    """Whether [N, G] of 16 bits can be read two numbers at a time."""
    even = numbers.shape[1] % 2 == 0 and numbers.stride(0) % 2 == 0
    return numbers.element_size() == 2 and even and numbers.data_ptr() % 4 == 0


def _fast(weight: QuantizedWeight, scale: torch.dtype, dtype: torch.dtype, target: Target) -> int:
    if not target.assembly:
        return 0
    if isinstance(weight, GgufWeight):
        return BY_WORD if dtype in (torch.bfloat16, torch.float16) else 0
    if isinstance(weight, Fp8Weight):
        return E4M3 if target.arch >= NATIVE_FP8 else 0
    if isinstance(weight, Fp4Weight):
        return E2M1 if target.arch >= NATIVE_FP8 else 0
    if isinstance(weight, IntWeight) and weight.bits == 4:
        return FAST.get((scale, dtype), 0)
    return 0
