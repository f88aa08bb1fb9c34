"""GgufWeight: the quantization types of GGUF files (K-quants, IQ4, MXFP4), as kernels read them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, log2
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.quantized_weight import (
    DUMMY_SCALE,
    GroupedCodes,
    QuantizedWeight,
    row_chunks,
)
from lockstep.kernels.formats.weights.word_order import (
    pack_codes,
    pack_plane,
    unpack_plane,
    words_per_row,
)

SUPERBLOCK = 256
"""Columns that share a base scale (llama.cpp's QK_K)."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 codes of IQ4_NL and IQ4_XS."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1, so that they are integers; the scale is halved in return."""
TABLE_ZERO = 128
"""Bias of the entries of a lookup table, so that each is an unsigned byte."""


@dataclass(frozen=True)
class GgufType:
    """Arithmetic of a quantization type: w = scale * value(code) - minimum, in fp32.

    bits: of a code. group: columns per scale. zero: zero point, value(code) = code - zero. table:
    lookup table, value(code) = table[code]. two_level_scales: a scale (and a minimum) is base *
    step, with an fp16 base per SUPERBLOCK and an int8 step per group; else it is a 16-bit number.
    minima: whether groups have minima. exponents: scales are powers of two in bf16, else fp16.
    """

    bits: int
    group: int
    zero: int = 0
    table: tuple[int, ...] | None = None
    two_level_scales: bool = False
    minima: bool = False
    exponents: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of what is stored per group: a scale, or a step of the superblock's base."""
        if self.two_level_scales:
            return torch.int8
        return torch.bfloat16 if self.exponents else torch.float16

    @property
    def low_bits(self) -> int:
        """Bits of a code in the first bit plane: a power of two."""
        return 4 if self.bits >= 4 else 2

    @property
    def high_bits(self) -> int:
        """Bits of a code in the second bit plane, 0 without one."""
        return self.bits - self.low_bits

    def values(self, codes: Tensor) -> Tensor:
        """Return value(code) of uint8 codes, in fp32."""
        if self.table is None:
            return codes.float() - self.zero
        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table[codes.long()]

    def table_words(self) -> tuple[int, int]:
        """Return the lookup table as two int64 of eight bytes, each entry biased by TABLE_ZERO."""
        entries = bytes(value + TABLE_ZERO for value in self.table or ())
        low, high = (
            int.from_bytes(part, "little", signed=True) for part in (entries[:8], entries[8:])
        )
        return low, high


GGUF_TYPES: dict[str, GgufType] = {
    "Q4_0": GgufType(4, 32, zero=8),
    "Q4_1": GgufType(4, 32, minima=True),
    "Q5_0": GgufType(5, 32, zero=16),
    "Q5_1": GgufType(5, 32, minima=True),
    "Q8_0": GgufType(8, 32, zero=128),
    "Q2_K": GgufType(2, 16, two_level_scales=True, minima=True),
    "Q3_K": GgufType(3, 16, zero=4, two_level_scales=True),
    "Q4_K": GgufType(4, 32, two_level_scales=True, minima=True),
    "Q5_K": GgufType(5, 32, two_level_scales=True, minima=True),
    "Q6_K": GgufType(6, 16, zero=32, two_level_scales=True),
    "IQ4_NL": GgufType(4, 32, table=IQ4_VALUES),
    "IQ4_XS": GgufType(4, 32, table=IQ4_VALUES, two_level_scales=True),
    "MXFP4": GgufType(4, 32, table=MXFP4_VALUES, exponents=True),
}
"""Quantization types by their names in files. Q4_0 and Q8_0 are stored as IntWeight."""


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """Codes of 2 to 6 bits in groups along K: round(fp32(scale) * value(code) - fp32(minimum)).

    words: first bit plane, the lowest four bits of a code (two for types of 2 and 3 bits). high:
    [N, W] int32, second bit plane, the one or two bits above. Both are in the order of pack_plane.
    scales, minima: [N, G] of type.scale_dtype. bases, min_bases: [N, S] fp16 where scales are base
    * step. The product of scale and value is exact in fp32 wherever there are minima, so an fma
    rounds like the subtraction.
    """

    scales: Tensor
    minima: Tensor | None
    bases: Tensor | None
    min_bases: Tensor | None
    high: Tensor | None
    type_name: str

    @property
    def type(self) -> GgufType:
        """Arithmetic of the codes."""
        return GGUF_TYPES[self.type_name]

    @property
    def bits(self) -> int:
        """Bits of a code in `words`."""
        return self.type.low_bits

    @property
    def group(self) -> int:
        """Columns per scale."""
        return self.type.group

    @classmethod
    def empty(cls, n: int, k: int, type_name: str, *, device: str | torch.device = "cpu") -> Self:
        """Allocate a weight [n, k] of a type of GGUF_TYPES with up to 6 bits."""
        type = GGUF_TYPES[type_name]

        def allocate(count: int, dtype: torch.dtype, present: bool) -> Tensor | None:
            return torch.empty(n, count, dtype=dtype, device=device) if present else None

        groups = -(-k // type.group)
        superblocks = -(-k // SUPERBLOCK)
        words = torch.empty(n, words_per_row(k, type.low_bits), dtype=torch.int32, device=device)
        scales = torch.empty(n, groups, dtype=type.scale_dtype, device=device)
        high_bits = type.high_bits
        return cls(
            words=words,
            k=k,
            scales=scales,
            minima=allocate(groups, type.scale_dtype, type.minima),
            bases=allocate(superblocks, torch.float16, type.two_level_scales),
            min_bases=allocate(superblocks, torch.float16, type.two_level_scales and type.minima),
            high=allocate(words_per_row(k, high_bits), torch.int32, high_bits > 0),
            type_name=type_name,
        )

    def fill_codes(self, codes: Tensor) -> None:
        """Store codes [N, K] uint8 of type.bits bits."""
        bits = self.bits
        self.words.copy_(pack_plane(codes & (2**bits - 1), bits))
        if self.high is not None:
            self.high.copy_(pack_plane(codes >> bits, self.type.high_bits))

    def codes(self) -> Tensor:
        low = unpack_plane(self.words, self.bits, self.k)
        if self.high is None:
            return low
        return low | unpack_plane(self.high, self.type.high_bits, self.k) << self.bits

    def _per_group(self, scales: Tensor, bases: Tensor | None) -> Tensor:
        """Return the scales or minima of all groups: [N, G] fp32."""
        wide = scales.float()
        if bases is not None:
            groups = SUPERBLOCK // self.group
            wide = bases.float().repeat_interleave(groups, 1)[:, : wide.shape[1]] * wide
        return wide

    def _per_column(self, scales: Tensor, bases: Tensor | None) -> Tensor:
        """Return the scales or minima of all columns: [N, K] fp32."""
        return self._per_group(scales, bases).repeat_interleave(self.group, 1)[:, : self.k]

    def grouped(self) -> GroupedCodes:
        type = self.type
        zero = type.zero
        bits = 4 if type.bits <= 4 and type.table is None else 8
        if (bits, type.high_bits) == (self.bits, 0):
            words = self.words
        elif type.table is None:
            words = pack_codes(self.codes(), bits)
        else:
            # A looked-up value is a whole number between -128 and 127.
            zero = TABLE_ZERO
            words = pack_codes((type.values(self.codes()) + zero).to(torch.uint8), bits)
        scales = self._per_group(self.scales, self.bases)
        if self.minima is None:
            offsets = torch.full_like(scales, zero)
        else:
            offsets = self._per_group(self.minima, self.min_bases)
        return GroupedCodes(words, bits, scales, offsets, self.group, self.minima is not None)

    def _values(self, codes: Tensor) -> Tensor:
        product = self.type.values(codes) * self._per_column(self.scales, self.bases)
        if self.minima is None:
            return product
        return product - self._per_column(self.minima, self.min_bases)

    def fill_dummy(self, generator: torch.Generator) -> None:
        type = self.type
        for begin, end in row_chunks(*self.shape):
            part = self.rows(begin, end)
            codes = torch.empty(part.shape, dtype=torch.uint8, device=self.device)
            part.fill_codes(codes.random_(0, 2**type.bits, generator=generator))
        values = type.values(torch.arange(2**type.bits, dtype=torch.uint8))
        scale = DUMMY_SCALE * self.k**-0.5 / float(values.std())
        step = 1.0
        if self.bases is not None:
            step = 24.0
            self.scales.random_(16, 33, generator=generator)
            self.bases.fill_(scale / step)
        elif type.exponents:
            # Two neighbouring powers of two, mixed so that their mean square is scale^2.
            lower = 2.0 ** floor(log2(scale))
            probability = (scale**2 / lower**2 - 1) / 3
            uniform = torch.empty(self.scales.shape, device=self.device)
            larger = uniform.uniform_(generator=generator) < probability
            self.scales.copy_(lower * (1 + larger.float()))
        else:
            self.scales.copy_(
                torch.empty(self.scales.shape, device=self.device).uniform_(
                    0.8 * scale, 1.2 * scale, generator=generator
                )
            )
        if self.minima is None:
            return
        # Minima that centre the values: trained weights have a mean near 0.
        middle = float(values.mean())
        if self.min_bases is not None:
            self.minima.random_(16, 33, generator=generator)
            self.min_bases.fill_(middle * scale / step)
        else:
            self.minima.copy_(self.scales * middle)

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a weight whose tensors are function(tensor) of this one's."""
        parts: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **parts)

    def rows(self, begin: int, end: int) -> Self:
        return self._map_tensors(lambda tensor: tensor[begin:end])

    def gather(self, ids: Tensor) -> Self:
        return self._map_tensors(lambda tensor: tensor[ids])

    def reorder(self, order: Tensor) -> None:
        for tensor in self.tensors().values():
            tensor.copy_(tensor[order])
