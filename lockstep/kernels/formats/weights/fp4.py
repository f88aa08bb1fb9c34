"""Fp4Weight: NVFP4, 4-bit floats with a scale per 16 columns and a factor per output."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.formats.weights.quantized_weight import DUMMY_SCALE, QuantizedWeight
from lockstep.kernels.formats.weights.word_order import pack_codes, words_per_row

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 .. 7 of e2m1; bit 3 is the sign."""
MAX_FP4_FACTOR = 2.0**119
"""Bound of the magnitude of Fp4Weight.factors: kernels take them 2^8 times larger."""
FP4_GROUP = 16
"""Columns that share a scale."""
E4M3_NAN = 0x7F
"""Code of e4m3fn's positive NaN; codes above it have a sign."""
UNSPLITTABLE_MANTISSAS = (0x5AAAAA, 0x655556)
"""Mantissas, of 2^23, of the two factors that no pair hi + lo of bf16 represents."""
MIN_SPLIT_FACTOR = 2.0**-80
MAX_SPLIT_FACTOR = 2.0**6
"""Factors outside of this range are not split: products of the parts may underflow or overflow."""


@dataclass(frozen=True)
class Fp4Weight(QuantizedWeight):
    """NVFP4: e2m1 codes, an e4m3 scale per 16 columns, an fp32 factor per output.

    A value is round((fp32(code) * fp32(scale)) * factor). scales: [N, ceil(K / 16)] uint8, codes of
    e4m3fn. factors: [N] fp32 multipliers below MAX_FP4_FACTOR (compressed-tensors stores divisors).
    parent: the weight that this is a row range of, else None.
    """

    scales: Tensor
    factors: Tensor
    parent: Self | None = None

    @property
    def derived(self) -> tuple[str, ...]:
        return ("has_split_factors",)

    @property
    def bits(self) -> int:
        return 4

    @cached_property
    def has_split_factors(self) -> bool:
        """Return whether bf16 hi + lo represents every factor of the weight (SPLIT_FACTOR_FP4).

        No scale may have a sign or be NaN either. A row range answers for its parent. The result is
        cached: factors and scales must not change afterwards.
        """
        if self.parent is not None:
            return self.parent.has_split_factors
        magnitude = self.factors.abs()
        mantissa = self.factors.view(torch.int32) & 0x7FFFFF
        unsplittable = torch.tensor(UNSPLITTABLE_MANTISSAS, device=self.device)
        odd = torch.isin(mantissa, unsplittable)
        in_range = (magnitude >= MIN_SPLIT_FACTOR) & (magnitude < MAX_SPLIT_FACTOR)
        splits = (in_range & ~odd) | (magnitude == 0)
        return bool(splits.all()) and int(self.scales.max()) < E4M3_NAN

    @classmethod
    def empty(cls, n: int, k: int, *, device: str | torch.device = "cpu") -> Self:
        """Allocate a weight [n, k]."""
        return cls(
            words=torch.empty(n, words_per_row(k, 4), dtype=torch.int32, device=device),
            k=k,
            scales=torch.empty(n, -(-k // FP4_GROUP), dtype=torch.uint8, device=device),
            factors=torch.empty(n, device=device),
        )

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, factors: Tensor) -> Self:
        """Pack codes [N, K] uint8 below 16. scales: e4m3fn, or uint8 of the same bits."""
        return cls(pack_codes(codes, 4), codes.shape[1], scales.view(torch.uint8), factors.float())

    def rows(self, begin: int, end: int) -> Self:
        parts = (self.scales[begin:end], self.factors[begin:end])
        return type(self)(self.words[begin:end], self.k, *parts, parent=self.parent or self)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.words.random_(-(2**31), 2**31, generator=generator)
        self.scales.random_(0x38, 0x40, generator=generator)  # 1 .. 1.875
        values = torch.tensor(FP4_VALUES)
        codes = torch.arange(0x38, 0x40, dtype=torch.uint8)
        spread = float(values.square().mean().sqrt() * e4m3_values(codes).square().mean().sqrt())
        factor = DUMMY_SCALE * self.k**-0.5 / spread
        self.factors.uniform_(0.8 * factor, 1.2 * factor, generator=generator)

    def _values(self, codes: Tensor) -> Tensor:
        values = torch.tensor(FP4_VALUES, device=self.device)
        table = torch.cat([values, -values])
        columns = torch.arange(self.k, device=self.device) // FP4_GROUP
        scaled = table[codes.long()] * e4m3_values(self.scales)[:, columns]
        return scaled * self.factors[:, None]

    def gather(self, ids: Tensor) -> Self:
        return type(self)(self.words[ids], self.k, self.scales[ids], self.factors[ids])

    def reorder(self, order: Tensor) -> None:
        self.words.copy_(self.words[order])
        self.scales.copy_(self.scales[order])
        self.factors.copy_(self.factors[order])
