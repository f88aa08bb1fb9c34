"""Weights that stay packed on the device: integers with scales, fp8 and fp4, as kernels read them.

All are row-major in the outputs N, so that `rows` of a weight are views of each of its tensors, and
all unpack elementwise: a format adds no numerics beyond its values. Codes are int32 words in the
order of word_order.py. Whatever a checkpoint's layout, a loader brings it to one
of these.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.word_order import pack_codes, unpack_codes, words_per_row

DUMMY_SCALE = 0.7
"""Standard deviation of a dummy weight, times sqrt(K)."""
CHUNK = 1 << 24
"""Numbers that are unpacked, repacked, quantised or drawn at once."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 .. 7 of e2m1; bit 3 is the sign."""
FP4_FACTORS = 2.0**119
"""The factors of Fp4Weight are below it in size: kernels take them 2^8 times larger."""
FP4_GROUP = 16
"""Columns that share a scale of Fp4Weight."""

E4M3_NAN = 0x7F
"""The code of e4m3fn without a sign that is NaN; above it are those with a sign."""
NO_PARTS = (0x5AAAAA, 0x655556)
"""Mantissas, of 2^23, of the two factors for which no hi and lo of bf16 serve."""
LEAST_IN_PARTS = 2.0**-80
MOST_IN_PARTS = 2.0**6
"""Factors outside are not multiplied in parts, whose products may be subnormal, or overflow."""


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """A weight [N, K] in fewer bits. words [N, W] int32: its codes; k: K, the columns in use."""

    derived: ClassVar[tuple[str, ...]] = ()
    """Cached properties that launches read."""

    words: Tensor
    k: int

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a code."""

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((self.words.shape[0], self.k))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.words.device

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by field."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @abstractmethod
    def rows(self, begin: int, end: int) -> Self:
        """The outputs begin .. end, 0 <= begin < end <= N, as views."""

    def finalize(self) -> None:
        """Compute what launches need of the weight's numbers, once, when it is filled.

        A captured step may be the first to launch the weight, and a capture cannot wait for the
        device.
        """
        for name in self.derived:
            getattr(self, name)

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fills it: unpacked, random weights at the scale of trained ones. See DUMMY_SCALE."""

    @abstractmethod
    def _values(self, codes: Tensor) -> Tensor:
        """codes [N, K] uint8 -> values [N, K] fp32."""

    def codes(self) -> Tensor:
        """[N, K] uint8."""
        return unpack_codes(self.words, self.bits, self.k)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """-> [N, K], each value computed in fp32 and rounded once to dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for begin, end in row_chunks(*self.shape):
            part = self.rows(begin, end)
            out[begin:end] = part._values(part.codes())
        return out

    @abstractmethod
    def gather(self, ids: Tensor) -> Self:
        """The outputs of these ids [M], as a weight of its own."""

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Puts output order[i] at i, in place. order [N]: each output once."""

    def copy_(self, other: Self) -> None:
        """Fills it with the tensors of another of the same layout."""
        mine = self.tensors()
        others = other.tensors()
        if type(self) is not type(other) or mine.keys() != others.keys():
            raise ValueError(f"{type(self).__name__} and {type(other).__name__} hold other tensors")
        for name, tensor in mine.items():
            if tensor.shape != others[name].shape:
                raise ValueError(f"{name} {list(others[name].shape)} for {list(tensor.shape)}")
            tensor.copy_(others[name])


@dataclass(frozen=True)
class IntWeight(QuantizedWeight):
    """Integers of 4 or 8 bits in groups along K: round(fp32(code - zero) * fp32(scale)).

    scales [N, G] fp16, bf16 or fp32, as the checkpoint has them; zeros [N, G], whole numbers below
    2^bits in the scales' dtype (so that both are read alike), or None: all are 2^(bits - 1). Column
    k is of group k // group, the last one may be partial, or, with desc_act, of group g_idx[k],
    g_idx [K] int32.
    """

    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    group: int
    width: int = 4

    @property
    def bits(self) -> int:
        return self.width

    @classmethod
    def empty(
        cls,
        n: int,
        k: int,
        bits: int = 4,
        group: int = 128,
        *,
        scale_dtype: torch.dtype = torch.bfloat16,
        zeros: bool = False,
        g_idx: bool = False,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Room for a weight [n, k]; group: -1 for all of K. zeros, g_idx: whether it has them."""
        group = k if group == -1 else group
        scales = torch.empty(n, -(-k // group), dtype=scale_dtype, device=device)
        return cls(
            words=torch.empty(n, words_per_row(k, bits), dtype=torch.int32, device=device),
            k=k,
            scales=scales,
            zeros=torch.empty_like(scales) if zeros else None,
            g_idx=torch.empty(k, dtype=torch.int32, device=device) if g_idx else None,
            group=group,
            width=bits,
        )

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        g_idx: Tensor | None = None,
        group: int = 128,
        bits: int = 4,
    ) -> Self:
        """codes [N, K] uint8, zeros of any dtype, the rest as the fields; group: -1: all of K."""
        k = codes.shape[1]
        zeros = None if zeros is None else zeros.to(scales.dtype)
        return cls(
            pack_codes(codes, bits), k, scales, zeros, g_idx, k if group == -1 else group, bits
        )

    def rows(self, begin: int, end: int) -> Self:
        zeros = None if self.zeros is None else self.zeros[begin:end]
        scales = self.scales[begin:end]
        words = self.words[begin:end]
        return type(self)(words, self.k, scales, zeros, self.g_idx, self.group, self.width)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.words.random_(-(2**31), 2**31, generator=generator)
        middle = 2 ** (self.bits - 1)
        spread = (2**self.bits) / 12**0.5
        wanted = DUMMY_SCALE * self.k**-0.5 / spread
        self.scales.copy_(
            torch.empty(self.scales.shape, device=self.device).uniform_(
                0.8 * wanted, 1.2 * wanted, generator=generator
            )
        )
        if self.zeros is not None:
            self.zeros.random_(middle - 1, middle + 2, generator=generator)
        if self.g_idx is not None:
            self.g_idx.copy_(torch.arange(self.k, device=self.device) // self.group)

    def groups(self) -> Tensor:
        """The group of each column: [K] int64."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.k, device=self.device) // self.group

    def _values(self, codes: Tensor) -> Tensor:
        groups = self.groups()
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[:, groups]
        return (codes.float() - zeros) * self.scales.float()[:, groups]

    def gather(self, ids: Tensor) -> Self:
        zeros = None if self.zeros is None else self.zeros[ids]
        words = self.words[ids]
        scales = self.scales[ids]
        return type(self)(words, self.k, scales, zeros, self.g_idx, self.group, self.width)

    def reorder(self, order: Tensor) -> None:
        self.words.copy_(self.words[order])
        self.scales.copy_(self.scales[order])
        if self.zeros is not None:
            self.zeros.copy_(self.zeros[order])


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """e4m3fn codes with a scale per block of block_n x block_k: round(fp32(code) * scale).

    scales [R, C] fp32. Element (n, k) takes scales[(first + n) // block_n, k // block_k]; `first`
    is where row 0 stands in its block, so that rows may be cut anywhere. block_n 1 and block_k K:
    a scale per output; N and K: one for all; 128 and 128: DeepSeek's blocks.
    """

    scales: Tensor
    block_n: int
    block_k: int
    first: int = 0

    @property
    def bits(self) -> int:
        return 8

    @classmethod
    def empty(
        cls, n: int, k: int, block_n: int, block_k: int, *, device: str | torch.device = "cpu"
    ) -> Self:
        """Room for a weight [n, k]."""
        return cls(
            words=torch.empty(n, words_per_row(k, 8), dtype=torch.int32, device=device),
            k=k,
            scales=torch.empty(-(-n // block_n), -(-k // block_k), device=device),
            block_n=block_n,
            block_k=block_k,
        )

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, block_n: int, block_k: int) -> Self:
        """codes [N, K] e4m3fn, or uint8 of the same bits; scales [R, C] of any float dtype."""
        words = pack_codes(codes.view(torch.uint8), 8)
        return cls(words, codes.shape[1], scales.float(), block_n, block_k)

    def rows(self, begin: int, end: int) -> Self:
        top = (self.first + begin) // self.block_n
        bottom = -(-(self.first + end) // self.block_n)
        first = (self.first + begin) % self.block_n
        scales = self.scales[top:bottom]
        words = self.words[begin:end]
        return type(self)(words, self.k, scales, self.block_n, self.block_k, first)

    def with_row_scales(self) -> Self:
        """The same weight with a scale per row and block_k: parts of other blocks can be joined."""
        n = self.words.shape[0]
        lines = (self.first + torch.arange(n, device=self.device)) // self.block_n
        return type(self)(self.words, self.k, self.scales[lines], 1, self.block_k)

    def fill_dummy(self, generator: torch.Generator) -> None:
        spread = 64.0  # e4m3 holds up to 448: 7 standard deviations
        for begin, end in row_chunks(*self.shape):
            drawn = torch.empty(end - begin, self.k, device=self.device)
            drawn.normal_(0.0, spread, generator=generator).clamp_(-448, 448)
            self.words[begin:end] = pack_codes(drawn.to(torch.float8_e4m3fn).view(torch.uint8), 8)
        wanted = DUMMY_SCALE * self.k**-0.5 / spread
        self.scales.uniform_(0.8 * wanted, 1.2 * wanted, generator=generator)

    def _values(self, codes: Tensor) -> Tensor:
        n, k = self.shape
        lines = (self.first + torch.arange(n, device=self.device)) // self.block_n
        columns = torch.arange(k, device=self.device) // self.block_k
        return e4m3(codes) * self.scales[lines][:, columns]

    def gather(self, ids: Tensor) -> Self:
        """With a scale per row, whatever the blocks were."""
        lines = (self.first + ids) // self.block_n
        return type(self)(self.words[ids], self.k, self.scales[lines], 1, self.block_k)

    def reorder(self, order: Tensor) -> None:
        """Raises ValueError where the order does not move whole blocks of rows: the rows of a line
        of scales come from one line. Lines that reach beyond these rows stay."""
        n = self.words.shape[0]
        targets = (self.first + torch.arange(n, device=self.device)) // self.block_n
        sources = (self.first + order) // self.block_n
        moved = torch.arange(len(self.scales), device=self.device)
        moved[targets] = sources
        shared = [0] if self.first else []
        if (self.first + n) % self.block_n:
            shared.append(len(self.scales) - 1)
        if not torch.equal(moved[targets], sources) or any(int(moved[i]) != i for i in shared):
            raise ValueError(f"the order of rows cuts blocks of {self.block_n} rows")
        self.words.copy_(self.words[order])
        self.scales.copy_(self.scales[moved])


@dataclass(frozen=True)
class Fp4Weight(QuantizedWeight):
    """NVFP4: e2m1 codes, an e4m3 scale per 16 columns, an fp32 factor per output.

    round((fp32(code) * fp32(scale)) * factor). scales [N, ceil(K / 16)] uint8: the codes of e4m3fn;
    factors [N] fp32, below FP4_FACTORS: multipliers (compressed-tensors stores the divisor). whole:
    the weight that these are rows of; None: its own.
    """

    derived = ("in_parts",)

    scales: Tensor
    factors: Tensor
    whole: Self | None = None

    @property
    def bits(self) -> int:
        return 4

    @cached_property
    def in_parts(self) -> bool:
        """Whether each factor of the whole weight has two parts in bf16 that multiply as it does,
        and no scale has a sign or is NaN. Found once: both must not change behind it."""
        if self.whole is not None:
            return self.whole.in_parts
        size = self.factors.abs()
        mantissa = self.factors.view(torch.int32) & 0x7FFFFF
        odd = torch.isin(mantissa, torch.tensor(NO_PARTS, device=self.device))
        fits = (size >= LEAST_IN_PARTS) & (size < MOST_IN_PARTS) & ~odd
        return bool((fits | (size == 0)).all()) and int(self.scales.max()) < E4M3_NAN

    @classmethod
    def empty(cls, n: int, k: int, *, device: str | torch.device = "cpu") -> Self:
        """Room for a weight [n, k]."""
        return cls(
            words=torch.empty(n, words_per_row(k, 4), dtype=torch.int32, device=device),
            k=k,
            scales=torch.empty(n, -(-k // FP4_GROUP), dtype=torch.uint8, device=device),
            factors=torch.empty(n, device=device),
        )

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, factors: Tensor) -> Self:
        """codes [N, K] uint8 below 16; scales e4m3fn, or uint8 of the same bits."""
        return cls(pack_codes(codes, 4), codes.shape[1], scales.view(torch.uint8), factors.float())

    def rows(self, begin: int, end: int) -> Self:
        parts = (self.scales[begin:end], self.factors[begin:end])
        return type(self)(self.words[begin:end], self.k, *parts, whole=self.whole or self)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.words.random_(-(2**31), 2**31, generator=generator)
        self.scales.random_(0x38, 0x40, generator=generator)  # 1 .. 1.875
        values = torch.tensor(FP4_VALUES)
        codes = torch.arange(0x38, 0x40, dtype=torch.uint8)
        spread = float(values.square().mean().sqrt() * e4m3(codes).square().mean().sqrt())
        wanted = DUMMY_SCALE * self.k**-0.5 / spread
        self.factors.uniform_(0.8 * wanted, 1.2 * wanted, generator=generator)

    def _values(self, codes: Tensor) -> Tensor:
        values = torch.tensor(FP4_VALUES, device=self.device)
        table = torch.cat([values, -values])
        columns = torch.arange(self.k, device=self.device) // FP4_GROUP
        scaled = table[codes.long()] * e4m3(self.scales)[:, columns]
        return scaled * self.factors[:, None]

    def gather(self, ids: Tensor) -> Self:
        return type(self)(self.words[ids], self.k, self.scales[ids], self.factors[ids])

    def reorder(self, order: Tensor) -> None:
        self.words.copy_(self.words[order])
        self.scales.copy_(self.scales[order])
        self.factors.copy_(self.factors[order])


def e4m3(codes: Tensor) -> Tensor:
    """uint8 codes of e4m3fn -> their values in fp32."""
    return codes.view(torch.float8_e4m3fn).float()


def row_chunks(n: int, k: int, unit: int = 1) -> list[tuple[int, int]]:
    """Rows of a weight [n, k] in row_chunks of about CHUNK numbers, cut at multiples of `unit`."""
    step = max(CHUNK // max(k, 1) // unit, 1) * unit
    return [(begin, min(begin + step, n)) for begin in range(0, n, step)]
