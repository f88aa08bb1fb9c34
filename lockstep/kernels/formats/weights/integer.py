"""IntWeight: 4-bit and 8-bit integers with scales and zero points per group."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.quantized_weight import (
    DUMMY_SCALE,
    GroupedCodes,
    QuantizedWeight,
)
from lockstep.kernels.formats.weights.word_order import pack_codes, words_per_row

FMA_SCALE_BOUND = 2.0**-1
"""Bound of the magnitude of bf16 scales, below which one fma dequantizes a pair of 4-bit codes.

The decoder takes scales 2^129 times larger (quantized_ptx.py). They must be finite in bf16, whose
largest number is (2 - 2^-7) * 2^127. So the largest scale is (2 - 2^-7) * 2^-2.
"""


@dataclass(frozen=True)
class IntWeight(QuantizedWeight):
    """Integers of 4 or 8 bits with scales per group along K: round((code - zero) * scale).

    scales: [N, G] fp16, bf16 or fp32, as in the checkpoint. zeros: zero points [N, G], whole
    numbers below 2^bits in the scales' dtype (so that one loader serves both); None: all are
    2^(bits - 1). group: column k belongs to group k // group; the last group may be partial. g_idx:
    [K] int32, the group of each column instead (GPTQ's desc_act). width: bits of a code. parent:
    the weight that this is a row range of, else None.
    """

    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    group: int
    width: int = 4
    parent: Self | None = None

    @property
    def bits(self) -> int:
        return self.width

    @property
    def has_fma_decoder(self) -> bool:
        """Return whether a bf16 model may dequantize each pair of codes by one fma.

        That needs codes of 4 bits, no zero points, and bf16 scales. Their magnitude must be below
        FMA_SCALE_BOUND, too (max_scale).
        """
        return self.bits == 4 and self.zeros is None and self.scales.dtype == torch.bfloat16

    @property
    def derived(self) -> tuple[str, ...]:
        return ("max_scale",) if self.has_fma_decoder else ()

    @cached_property
    def max_scale(self) -> float:
        """Return the largest magnitude of a scale; NaN if a scale is NaN.

        A row range answers for its parent. The result is cached: scales must not change afterwards.
        """
        if self.parent is not None:
            return self.parent.max_scale
        low, high = torch.aminmax(self.scales)
        return max(-float(low), float(high))

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
        """Allocate a weight [n, k]. group: -1 for all of K; zeros, g_idx: whether it has them."""
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
        """Pack codes [N, K] uint8. zeros may have any dtype; group: -1 for all of K."""
        k = codes.shape[1]
        zeros = None if zeros is None else zeros.to(scales.dtype)
        return cls(
            pack_codes(codes, bits), k, scales, zeros, g_idx, k if group == -1 else group, bits
        )

    def rows(self, begin: int, end: int) -> Self:
        zeros = None if self.zeros is None else self.zeros[begin:end]
        scales = self.scales[begin:end]
        words = self.words[begin:end]
        parent = self.parent or self
        return type(self)(words, self.k, scales, zeros, self.g_idx, self.group, self.width, parent)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.words.random_(-(2**31), 2**31, generator=generator)
        middle = 2 ** (self.bits - 1)
        spread = (2**self.bits) / 12**0.5
        scale = DUMMY_SCALE * self.k**-0.5 / spread
        self.scales.copy_(
            torch.empty(self.scales.shape, device=self.device).uniform_(
                0.8 * scale, 1.2 * scale, generator=generator
            )
        )
        if self.zeros is not None:
            self.zeros.random_(middle - 1, middle + 2, generator=generator)
        if self.g_idx is not None:
            self.g_idx.copy_(torch.arange(self.k, device=self.device) // self.group)

    def groups(self) -> Tensor:
        """Return the group of each column: [K] int64."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return torch.arange(self.k, device=self.device) // self.group

    def _values(self, codes: Tensor) -> Tensor:
        groups = self.groups()
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[:, groups]
        return (codes.float() - zeros) * self.scales.float()[:, groups]

    def grouped(self) -> GroupedCodes | None:
        if self.g_idx is not None:
            return None
        scales = self.scales.float()
        middle = torch.tensor(2.0 ** (self.bits - 1), device=self.device).expand_as(scales)
        offsets = middle if self.zeros is None else self.zeros.float()
        return GroupedCodes(self.words, self.bits, scales, offsets, self.group, minima=False)

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
