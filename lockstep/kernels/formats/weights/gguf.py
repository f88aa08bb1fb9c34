"""Weights in the quantization types of GGUF files, as kernels read them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor, log2
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.weights import DUMMY_SCALE, QuantizedWeight, row_chunks
from lockstep.kernels.formats.weights.word_order import pack_plane, unpack_plane, words_per_row

SUPERBLOCK = 256
"""Columns that share a base scale."""
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 codes of IQ4_NL and IQ4_XS."""
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1; the scale is halved in return."""
TABLE_ZERO = 128
"""Added to the entries of a table, so that each is a byte without a sign."""


@dataclass(frozen=True)
class GgufType:
    """Arithmetic of a quantization type: w = scale * value(code) - minimum, in fp32.

    bits: of a code. group: columns per scale. zero: value(code) = code - zero. table: value(code) =
    table[code]. steps: a scale (and a minimum) is base * step, with a base in fp16 per SUPERBLOCK
    and an int8 step per group; else it is a number of 16 bits. minima: whether there are any.
    exponents: scales are powers of two in bf16, else fp16.
    """

    bits: int
    group: int
    zero: int = 0
    table: tuple[int, ...] | None = None
    steps: bool = False
    minima: bool = False
    exponents: bool = False

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the numbers that are stored per group."""
        if self.steps:
            return torch.int8
        return torch.bfloat16 if self.exponents else torch.float16

    @property
    def low_bits(self) -> int:
        """Bits of a code in the first plane: a power of two."""
        return 4 if self.bits >= 4 else 2

    @property
    def high_bits(self) -> int:
        """Bits of a code in the second plane."""
        return self.bits - self.low_bits

    def values(self, codes: Tensor) -> Tensor:
        """Return value(code) of uint8 codes, in fp32."""
        if self.table is None:
            return codes.float() - self.zero
        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table[codes.long()]

    def table_words(self) -> tuple[int, int]:
        """Return the table as two int64 of eight bytes, each entry raised by TABLE_ZERO."""
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
    "Q2_K": GgufType(2, 16, steps=True, minima=True),
    "Q3_K": GgufType(3, 16, zero=4, steps=True),
    "Q4_K": GgufType(4, 32, steps=True, minima=True),
    "Q5_K": GgufType(5, 32, steps=True, minima=True),
    "Q6_K": GgufType(6, 16, zero=32, steps=True),
    "IQ4_NL": GgufType(4, 32, table=IQ4_VALUES),
    "IQ4_XS": GgufType(4, 32, table=IQ4_VALUES, steps=True),
    "MXFP4": GgufType(4, 32, table=MXFP4_VALUES, exponents=True),
}
"""Quantization types by their names in files. Q4_0 and Q8_0 are stored as IntWeight."""


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """Codes of 2 to 6 bits in groups along K: round(fp32(scale) * value(code) - fp32(minimum)).

    words: the codes' lowest four bits, or of types with 2 and 3 bits the lowest two. high [N, W]
    int32: the one or two bits above. Both are in the order of pack_plane. scales, minima [N, G] of
    type.scale_dtype; bases, min_bases [N, S] fp16 where scales are base * step. The product of
    scale and value is exact in fp32 wherever there are minima, so an fma rounds as a subtraction.
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
        """Allocate a weight [n, k] of a type of GGUF_TYPES with 6 bits at most."""
        type = GGUF_TYPES[type_name]

        def room(count: int, dtype: torch.dtype, there: bool = True) -> Tensor | None:
            return torch.empty(n, count, dtype=dtype, device=device) if there else None

        groups = -(-k // type.group)
        superblocks = -(-k // SUPERBLOCK)
        words = torch.empty(n, words_per_row(k, type.low_bits), dtype=torch.int32, device=device)
        scales = torch.empty(n, groups, dtype=type.scale_dtype, device=device)
        high_bits = type.high_bits
        return cls(
            words=words,
            k=k,
            scales=scales,
            minima=room(groups, type.scale_dtype, type.minima),
            bases=room(superblocks, torch.float16, type.steps),
            min_bases=room(superblocks, torch.float16, type.steps and type.minima),
            high=room(words_per_row(k, high_bits), torch.int32, high_bits > 0),
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

    def _by_column(self, numbers: Tensor, bases: Tensor | None) -> Tensor:
        """Return the scales or minima of all columns: [N, K] fp32."""
        wide = numbers.float()
        if bases is not None:
            each = SUPERBLOCK // self.group
            wide = bases.float().repeat_interleave(each, 1)[:, : wide.shape[1]] * wide
        return wide.repeat_interleave(self.group, 1)[:, : self.k]

    def _values(self, codes: Tensor) -> Tensor:
        product = self.type.values(codes) * self._by_column(self.scales, self.bases)
        if self.minima is None:
            return product
        return product - self._by_column(self.minima, self.min_bases)

    def fill_dummy(self, generator: torch.Generator) -> None:
        type = self.type
        for begin, end in row_chunks(*self.shape):
            part = self.rows(begin, end)
            drawn = torch.empty(part.shape, dtype=torch.uint8, device=self.device)
            part.fill_codes(drawn.random_(0, 2**type.bits, generator=generator))
        values = type.values(torch.arange(2**type.bits, dtype=torch.uint8))
        scale = DUMMY_SCALE * self.k**-0.5 / float(values.std())
        step = 1.0
        if self.bases is not None:
            step = 24.0
            self.scales.random_(16, 33, generator=generator)
            self.bases.fill_(scale / step)
        elif type.exponents:
            # Two neighbouring powers of two, in the shares that give the mean square wanted.
            lower = 2.0 ** floor(log2(scale))
            share = (scale**2 / lower**2 - 1) / 3
            drawn = torch.empty(self.scales.shape, device=self.device)
            larger = drawn.uniform_(generator=generator) < share
            self.scales.copy_(lower * (1 + larger.float()))
        else:
            self.scales.copy_(
                torch.empty(self.scales.shape, device=self.device).uniform_(
                    0.8 * scale, 1.2 * scale, generator=generator
                )
            )
        if self.minima is None:
            return
        # The mean of the values becomes about 0.
        middle = float(values.mean())
        if self.min_bases is not None:
            self.minima.random_(16, 33, generator=generator)
            self.min_bases.fill_(middle * scale / step)
        else:
            self.minima.copy_(self.scales * middle)

    def _each(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return the weight of what `take` makes of each tensor."""
        parts: dict[str, Any] = {name: take(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **parts)

    def rows(self, begin: int, end: int) -> Self:
        return self._each(lambda tensor: tensor[begin:end])

    def gather(self, ids: Tensor) -> Self:
        return self._each(lambda tensor: tensor[ids])

    def reorder(self, order: Tensor) -> None:
        for tensor in self.tensors().values():
            tensor.copy_(tensor[order])
