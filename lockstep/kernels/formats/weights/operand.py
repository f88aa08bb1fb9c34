"""Build the WeightOperand and WeightFormat of a weight, which kernels take."""

import torch
import triton.language as tl
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.compile_target import NATIVE_FP8, CompileTarget, uses_mma_sync
from lockstep.kernels.formats.weights.dequantize_tile import K_BLOCK, WeightFormat, WeightOperand
from lockstep.kernels.formats.weights.fp4 import FP4_GROUP, Fp4Weight
from lockstep.kernels.formats.weights.fp8 import Fp8Weight
from lockstep.kernels.formats.weights.gguf import SUPERBLOCK, TABLE_ZERO, GgufWeight
from lockstep.kernels.formats.weights.integer import FMA_SCALE_BOUND, IntWeight
from lockstep.kernels.formats.weights.quantized_weight import QuantizedWeight

KINDS = {IntWeight: 1, Fp8Weight: 2, Fp4Weight: 3, GgufWeight: 4}
"""WeightFormat.kind of each class (kernels/device/dequantize.py)."""
GENERIC = 0
INT4_DECODERS = {
    (torch.bfloat16, torch.bfloat16): 1,
    (torch.float16, torch.float16): 1,
    (torch.float16, torch.bfloat16): 2,
}
"""(dtype of the scales, dtype of the model) -> PAIRED_INT4 or SPLIT_SCALE_INT4."""
CVT_E4M3 = 3
FP16_E2M1 = 4
SPLIT_FACTOR_FP4 = 5
WORD_GGUF = 6
FMA_INT4 = 7
TL_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def group_size_of(weight: QuantizedWeight) -> int:
    """Return the columns that share a scale, 0 where all of them do."""
    if isinstance(weight, Fp4Weight):
        return FP4_GROUP
    if isinstance(weight, IntWeight | GgufWeight):
        group = weight.group
    else:
        assert isinstance(weight, Fp8Weight)
        group = weight.block_k
    return 0 if group >= weight.k else group


def has_irregular_groups(weight: QuantizedWeight) -> bool:
    """Return whether load_tile cannot read the scales; such a weight is dequantized in memory.

    That is so with g_idx (desc_act), and where groups are neither multiples of a block of
    interleaved columns nor equal parts of one.
    """
    if isinstance(weight, IntWeight) and weight.g_idx is not None:
        return True
    group = group_size_of(weight)
    # A 4-bit word covers 32 columns; the others have a scale per half word, or words of 16 columns.
    min_group = 16 if weight.bits == 8 or isinstance(weight, Fp4Weight | GgufWeight) else 32
    block = int(K_BLOCK)
    return bool(group and group % block and (block % group or group < min_group))


def fit_block_k(weight: QuantizedWeight, block_k: int, length: int) -> int:
    """Return `block_k` if tiles of this many columns suit the weight, else K_BLOCK.

    A tile must divide the partition of `length` columns, and hold whole groups or a part of one.
    """
    group = group_size_of(weight)
    aligned = group == 0 or block_k % group == 0 or group % block_k == 0
    return block_k if aligned and length % block_k == 0 else int(K_BLOCK)


def shared_memory_bytes(
    block_n: int, block_m: int, block_k: int, weight: QuantizedWeight, mma_sync: bool
) -> tuple[int, int]:
    """Return the bytes of shared memory of a tile: (per pipeline stage, outside of the stages).

    A stage is the words, scales and zero points of block_n weight rows, and block_m rows of a
    16-bit x. Outside of the stages there is a second copy of the x tile, the operand of the
    product, and with mma.sync the dequantized weight tile.
    """
    x_tile = 2 * block_m * block_k
    row = block_k * weight.bits // 8
    group = group_size_of(weight)
    if group:
        scales = weight.tensors()["scales"]
        row += -(-block_k // group) * scales.element_size() * (1 + _has_offsets(weight))
    if isinstance(weight, GgufWeight):
        row += block_k * weight.type.high_bits // 8
        if weight.bases is not None:
            row += -(-block_k // SUPERBLOCK) * 2 * (1 + _has_offsets(weight))
    return block_n * row + x_tile, x_tile + 2 * block_n * block_k * mma_sync


def _has_offsets(weight: QuantizedWeight) -> bool:
    """Return whether each scale comes with a zero point or a minimum."""
    return not {"zeros", "minima"}.isdisjoint(weight.tensors())


def fit_stages(
    num_stages: int, block_n: int, block_m: int, block_k: int, weight: QuantizedWeight, arch: int,
    mma_sync: bool = False,
) -> int:  # fmt: skip
    """Return `num_stages`, reduced to what fits into the shared memory of an architecture.

    mma_sync: the tile is multiplied by mma.sync also where the architecture has wgmma.
    """
    mma_sync = mma_sync or uses_mma_sync(arch)
    stage, fixed = shared_memory_bytes(block_n, block_m, block_k, weight, mma_sync)
    return architecture.fit_stages(num_stages, stage, fixed, arch)


def dense_operand(weight: Tensor) -> tuple[WeightOperand, WeightFormat]:
    """Return what load_tile takes of a dense weight [..., K], contiguous along K."""
    return WeightOperand(weight, row_stride=weight.stride(-2)), WeightFormat()


def quantized_operand(
    weight: QuantizedWeight, dtype: torch.dtype, block_k: int, target: CompileTarget
) -> tuple[WeightOperand, WeightFormat]:
    """Return what load_tile takes of a quantized weight with regular groups.

    Args:
        dtype: of the model.
        block_k: columns of the kernel's tiles; 0: the kernel reads scales one at a time.
    """
    group = group_size_of(weight)
    zeros = weight.zeros if isinstance(weight, IntWeight) else None
    if isinstance(weight, GgufWeight):
        zeros = weight.minima
    scales: Tensor = weight.tensors()["scales"]
    few_scales = block_k > 0 and block_k in (group, 2 * group, 4 * group)
    few_scales = few_scales and not has_irregular_groups(weight)
    # Asynchronous copies move 4 bytes or more: 16-bit scales are read two at a time.
    paired = few_scales and _can_pair(scales) and (zeros is None or _can_pair(zeros))
    scale_rows = 1
    scale_row_offset = 0
    if isinstance(weight, Fp8Weight):
        per_tensor = weight.scales.shape[0] == 1
        scale_rows = 0 if per_tensor and weight.shape[0] > 1 else weight.block_n
        scale_row_offset = weight.first
    form = WeightFormat(
        kind=KINDS[type(weight)],
        bits=weight.bits,
        group_size=group,
        scale_rows=scale_rows,
        paired_scales=paired,
        scale_dtype=TL_DTYPES[scales.dtype],
        decoder=_decoder_of(weight, scales.dtype, dtype, target),
        opaque=target.opaque,
    )
    if paired:
        scales = scales.view(torch.int32)
        zeros = None if zeros is None else zeros.view(torch.int32)
    factors = weight.factors if isinstance(weight, Fp4Weight) else None
    operand = WeightOperand(
        words=weight.words,
        scales=scales,
        zeros=zeros,
        factors=factors,
        row_stride=weight.words.stride(0),
        scale_stride=scales.stride(0),
        scale_row_offset=scale_row_offset,
    )
    if isinstance(weight, GgufWeight):
        return _gguf_operand(weight, operand), _gguf_format(weight, form)
    return operand, form


def choose_fma_decoder(
    form: WeightFormat, weight: QuantizedWeight, dtype: torch.dtype
) -> WeightFormat:
    """Return the format with the decoder of one fma if the scales of an IntWeight allow it.

    For the pipeline kernels. Other formats, and weights with a larger scale or NaN, keep theirs.
    The choice never changes a bit.
    """
    if dtype != torch.bfloat16 or form.decoder == GENERIC or not isinstance(weight, IntWeight):
        return form
    if weight.has_fma_decoder and weight.max_scale < FMA_SCALE_BOUND:
        return form._replace(decoder=FMA_INT4)
    return form


def _gguf_operand(weight: GgufWeight, operand: WeightOperand) -> WeightOperand:
    """Add the second bit plane and the superblock scales of a GgufWeight."""
    return operand._replace(
        high_words=weight.high,
        high_stride=None if weight.high is None else weight.high.stride(0),
        bases=weight.bases,
        min_bases=weight.min_bases,
        base_stride=None if weight.bases is None else weight.bases.stride(0),
    )


def _gguf_format(weight: GgufWeight, form: WeightFormat) -> WeightFormat:
    """Add the constants of a GGUF type's arithmetic."""
    kind = weight.type
    if kind.table is not None:
        low, high = kind.table_words()
        form = form._replace(table_low=low, table_high=high)
    zero = kind.zero if kind.table is None else TABLE_ZERO
    return form._replace(
        high_bits=kind.high_bits, zero_point=zero, two_level_scales=kind.two_level_scales
    )


def _can_pair(values: Tensor) -> bool:
    """Return whether 16-bit values [N, G] can be read as 32-bit words."""
    even = values.shape[1] % 2 == 0 and values.stride(0) % 2 == 0
    return values.element_size() == 2 and even and values.data_ptr() % 4 == 0


def _decoder_of(
    weight: QuantizedWeight, scale_dtype: torch.dtype, dtype: torch.dtype, target: CompileTarget
) -> int:
    """Return the WeightFormat.decoder of a weight in a model of dtype."""
    if not target.inline_ptx:
        return GENERIC
    if isinstance(weight, GgufWeight):
        return WORD_GGUF if dtype in (torch.bfloat16, torch.float16) else GENERIC
    if isinstance(weight, Fp8Weight):
        return CVT_E4M3 if target.arch >= NATIVE_FP8 else GENERIC
    if isinstance(weight, Fp4Weight):
        return FP16_E2M1 if target.arch >= NATIVE_FP8 else GENERIC
    if isinstance(weight, IntWeight) and weight.bits == 4:
        return INT4_DECODERS.get((scale_dtype, dtype), GENERIC)
    return GENERIC
