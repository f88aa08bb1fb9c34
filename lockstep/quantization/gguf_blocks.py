"""Block layouts of GGUF tensors, and their values in fp32.

A quantized row is a sequence of blocks of 32 or 256 columns. Every layout here has the same form:

    w = scale * value(code) - minimum

value(code) is `code - zero`, or an entry of a table. A block of 256 columns has a base scale in
fp16 and, for each group of 16 or 32 columns, a small integer: scale = base * step. Minima have the
same form. All products and the difference are in fp32, as ggml's reference computes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, choice_error
from lockstep.kernels.formats.weights import GGUF_TYPES, GgufType, row_chunks


@dataclass(frozen=True)
class BlockFields:
    """Fields of B blocks, taken out of their bytes.

    codes [B, columns] uint8. scales [B] fp32: base scale of a block. steps [B, G] int16: integer
    factors of the base scale, one per group; None: the base scale is the scale of all columns.
    minima [B] fp32 and min_steps [B, G] int16: the same for minima; None: there are none.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor | None = None
    minima: Tensor | None = None
    min_steps: Tensor | None = None


@dataclass(frozen=True)
class BlockLayout:
    """Layout of one block.

    number: of the type in a file's tensor table. columns, nbytes: of a block. split: takes the
    fields out of blocks [B, nbytes] uint8. type: arithmetic of the fields.
    """

    number: int
    columns: int
    nbytes: int
    split: Callable[[Tensor], BlockFields]
    type: GgufType

    def dequantize(self, blocks: Tensor) -> Tensor:
        """Dequantize blocks [B, nbytes] uint8 to weights [B, columns] fp32."""
        fields = self.split(blocks)
        grouped = self.type.values(fields.codes).view(len(blocks), -1, self.type.group)
        weights = grouped * _by_group(fields.scales, fields.steps)
        if fields.minima is not None:
            weights = weights - _by_group(fields.minima, fields.min_steps)
        return weights.view(len(blocks), self.columns)


def _by_group(base: Tensor, steps: Tensor | None) -> Tensor:
    """Return base * steps as [B, G, 1] fp32; [B, 1, 1] without steps."""
    wide = base[:, None]
    return (wide if steps is None else wide * steps.float())[..., None]


def _bits(data: Tensor, bits: int, width: int) -> Tensor:
    """Split bytes into codes of this many bits: [B, n] -> [B, n * 8 / bits], uint8.

    Runs of `width` bytes give first their lowest bits, then the next ones, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    runs = data.reshape(len(data), -1, 1, width) >> shifts[:, None]
    return (runs & (2**bits - 1)).flatten(1)


def _fp16(data: Tensor) -> Tensor:
    """Read one little-endian fp16 per block: [B, 2] uint8 -> [B] fp32."""
    return data.contiguous().view(torch.float16).float()[:, 0]


def _q4_0(blocks: Tensor) -> BlockFields:
    return BlockFields(_bits(blocks[:, 2:], 4, 16), _fp16(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> BlockFields:
    # ggml adds the stored minimum; here it is subtracted, so its sign changes.
    codes = _bits(blocks[:, 4:], 4, 16)
    return BlockFields(codes, _fp16(blocks[:, :2]), minima=-_fp16(blocks[:, 2:4]))


def _q5(high: Tensor, low: Tensor) -> Tensor:
    """Join the fifth bits [B, 4] and the lower four [B, 16] of 32 codes."""
    return _bits(low, 4, 16) | _bits(high, 1, 1) << 4


def _q5_0(blocks: Tensor) -> BlockFields:
    return BlockFields(_q5(blocks[:, 2:6], blocks[:, 6:]), _fp16(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> BlockFields:
    codes = _q5(blocks[:, 4:8], blocks[:, 8:])
    return BlockFields(codes, _fp16(blocks[:, :2]), minima=-_fp16(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> BlockFields:
    # int8 q becomes code q + 128.
    return BlockFields(blocks[:, 2:] ^ 0x80, _fp16(blocks[:, :2]))


def _q2_k(blocks: Tensor) -> BlockFields:
    (steps, codes, scale, minimum) = blocks.split([16, 64, 2, 2], 1)
    return BlockFields(
        _bits(codes, 2, 32),
        _fp16(scale),
        (steps & 15).short(),
        _fp16(minimum),
        (steps >> 4).short(),
    )


def _q3_k(blocks: Tensor) -> BlockFields:
    (high, low, low_steps, high_steps, scale) = blocks.split([32, 64, 8, 4, 2], 1)
    # ggml subtracts 4 from a code whose bit of `high` is clear. Here that bit is the code's third
    # one, and 4 is subtracted from every code.
    steps = _bits(low_steps, 4, 8) | _bits(high_steps, 2, 4) << 4
    codes = _bits(low, 2, 32) | _bits(high, 1, 32) << 2
    return BlockFields(codes, _fp16(scale), steps.short() - 32)


def _steps_of_6_bits(data: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the eight steps and the eight steps of minima of Q4_K and Q5_K: [B, 12] uint8."""
    # The first four of each are the low 6 bits of a byte. The others have their low 4 bits in the
    # last four bytes and their high 2 bits in the top of the first eight.
    (scales, minima, rest) = data.split(4, 1)
    low = (scales & 63, minima & 63)
    high = ((rest & 15) | (scales >> 6) << 4, (rest >> 4) | (minima >> 6) << 4)
    steps = torch.cat([low[0], high[0]], 1)
    return steps.short(), torch.cat([low[1], high[1]], 1).short()


def _q4_k(blocks: Tensor) -> BlockFields:
    (scale, minimum, packed, codes) = blocks.split([2, 2, 12, 128], 1)
    steps, min_steps = _steps_of_6_bits(packed)
    return BlockFields(_bits(codes, 4, 32), _fp16(scale), steps, _fp16(minimum), min_steps)


def _q5_k(blocks: Tensor) -> BlockFields:
    (scale, minimum, packed, high, low) = blocks.split([2, 2, 12, 32, 128], 1)
    steps, min_steps = _steps_of_6_bits(packed)
    codes = _bits(low, 4, 32) | _bits(high, 1, 32) << 4
    return BlockFields(codes, _fp16(scale), steps, _fp16(minimum), min_steps)


def _q6_k(blocks: Tensor) -> BlockFields:
    # Q6_K stores its steps as int8, not in 6 bits.
    (low, high, steps, scale) = blocks.split([128, 64, 16, 2], 1)
    codes = _bits(low, 4, 64) | _bits(high, 2, 32) << 4
    return BlockFields(codes, _fp16(scale), steps.contiguous().view(torch.int8).short())


def _iq4_xs(blocks: Tensor) -> BlockFields:
    (scale, high, low, codes) = blocks.split([2, 2, 4, 128], 1)
    steps = _bits(low, 4, 1) | _bits(high, 2, 1) << 4
    return BlockFields(_bits(codes, 4, 16), _fp16(scale), steps.short() - 32)


def _mxfp4(blocks: Tensor) -> BlockFields:
    # 2^(exponent - 128): the exponent's bits are those of fp32, but for two subnormal numbers.
    exponent = blocks[:, 0].int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return BlockFields(_bits(blocks[:, 1:], 4, 16), bits.view(torch.float32))


_SPLITS: dict[str, tuple[int, int, int, Callable[[Tensor], BlockFields]]] = {
    "Q4_0": (2, 32, 18, _q4_0),
    "Q4_1": (3, 32, 20, _q4_1),
    "Q5_0": (6, 32, 22, _q5_0),
    "Q5_1": (7, 32, 24, _q5_1),
    "Q8_0": (8, 32, 34, _q8_0),
    "Q2_K": (10, 256, 84, _q2_k),
    "Q3_K": (11, 256, 110, _q3_k),
    "Q4_K": (12, 256, 144, _q4_k),
    "Q5_K": (13, 256, 176, _q5_k),
    "Q6_K": (14, 256, 210, _q6_k),
    "IQ4_NL": (20, 32, 18, _q4_0),
    "IQ4_XS": (23, 256, 136, _iq4_xs),
    "MXFP4": (39, 32, 17, _mxfp4),
}
"""Type -> (number in a file's tensor table, columns of a block, bytes of a block, split)."""
LAYOUTS: dict[str, BlockLayout] = {
    kind: BlockLayout(*fields, GGUF_TYPES[kind]) for kind, fields in _SPLITS.items()
}
"""Block layout of each quantized tensor type."""
PLAIN: dict[str, tuple[int, torch.dtype]] = {
    "F32": (0, torch.float32),
    "F16": (1, torch.float16),
    "BF16": (30, torch.bfloat16),
}
"""Plain tensor type -> (number in a file's tensor table, dtype)."""


def bytes_per_row(kind: str, columns: int) -> int:
    """Return the bytes of a row of this many columns.

    Raises CheckpointError for an unsupported type, and for columns that are no whole blocks.
    """
    if kind in PLAIN:
        return columns * PLAIN[kind][1].itemsize
    layout = layout_of(kind)
    if columns % layout.columns:
        raise CheckpointError(
            f"A GGUF tensor of type {kind} has rows of {columns} columns; allowed: multiples of "
            f"{layout.columns}. Fetch the file again."
        )
    return columns // layout.columns * layout.nbytes


def layout_of(kind: str) -> BlockLayout:
    """Return the block layout of a quantized type. Raises CheckpointError where there is none."""
    if kind not in LAYOUTS:
        raise choice_error(
            CheckpointError,
            "the type of a GGUF tensor",
            kind,
            ", ".join([*PLAIN, *LAYOUTS]),
            "Serve a file that is quantized to these types, e.g. Q4_K_M or Q8_0.",
        )
    return LAYOUTS[kind]


def dequantize(kind: str, blocks: Tensor) -> Tensor:
    """Return the weights of rows of blocks, as ggml's reference computes them.

    Args:
        kind: a type of LAYOUTS or PLAIN.
        blocks: [rows, bytes] uint8.

    Returns: [rows, columns] fp32.
    """
    if kind in PLAIN:
        return blocks.contiguous().view(PLAIN[kind][1]).float()
    layout = layout_of(kind)
    rows, size = blocks.shape
    columns = size // layout.nbytes * layout.columns
    out = torch.empty(rows, columns, device=blocks.device)
    for begin, end in row_chunks(rows, columns):
        part = blocks[begin:end].reshape(-1, layout.nbytes)
        out[begin:end] = layout.dequantize(part).view(end - begin, columns)
    return out
