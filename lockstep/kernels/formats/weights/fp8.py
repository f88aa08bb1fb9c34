"""Fp8Weight: e4m3 with scales per tensor, output or block."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.quantized_weight import (
    DUMMY_SCALE,
    QuantizedWeight,
    row_chunks,
)
from lockstep.kernels.formats.weights.word_order import pack_codes, words_per_row


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """e4m3fn codes with one scale per block of block_n x block_k: round(fp32(code) * scale).

    scales: [R, C] fp32; element (n, k) takes scales[(first + n) // block_n, k // block_k]. first:
    position of row 0 in its block, so that rows may be cut anywhere. block_n 1 and block_k K is a
    scale per output, N and K one per tensor, 128 and 128 DeepSeek's blocks.
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
        """Allocate a weight [n, k]."""
        return cls(
            words=torch.empty(n, words_per_row(k, 8), dtype=torch.int32, device=device),
            k=k,
            scales=torch.empty(-(-n // block_n), -(-k // block_k), device=device),
            block_n=block_n,
            block_k=block_k,
        )

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, block_n: int, block_k: int) -> Self:
        """Pack codes [N, K], e4m3fn or uint8 of the same bits. scales: [R, C], any float dtype."""
        words = pack_codes(codes.view(torch.uint8), 8)
        return cls(words, codes.shape[1], scales.float(), block_n, block_k)

    def rows(self, begin: int, end: int) -> Self:
        first_scale = (self.first + begin) // self.block_n
        last_scale = -(-(self.first + end) // self.block_n)
        first = (self.first + begin) % self.block_n
        scales = self.scales[first_scale:last_scale]
        words = self.words[begin:end]
        return type(self)(words, self.k, scales, self.block_n, self.block_k, first)

    def with_row_scales(self) -> Self:
        """Return the weight with a scale per row, so that weights of other blocks can join it."""
        n = self.words.shape[0]
        scale_rows = (self.first + torch.arange(n, device=self.device)) // self.block_n
        return type(self)(self.words, self.k, self.scales[scale_rows], 1, self.block_k)

    def fill_dummy(self, generator: torch.Generator) -> None:
        spread = 64.0  # the maximum of e4m3, 448, is 7 standard deviations
        for begin, end in row_chunks(*self.shape):
            values = torch.empty(end - begin, self.k, device=self.device)
            values.normal_(0.0, spread, generator=generator).clamp_(-448, 448)
            self.words[begin:end] = pack_codes(values.to(torch.float8_e4m3fn).view(torch.uint8), 8)
        scale = DUMMY_SCALE * self.k**-0.5 / spread
        self.scales.uniform_(0.8 * scale, 1.2 * scale, generator=generator)

    def _values(self, codes: Tensor) -> Tensor:
        n, k = self.shape
        scale_rows = (self.first + torch.arange(n, device=self.device)) // self.block_n
        columns = torch.arange(k, device=self.device) // self.block_k
        return e4m3_values(codes) * self.scales[scale_rows][:, columns]

    def gather(self, ids: Tensor) -> Self:
        """Return a copy of these outputs, with a scale per row whatever the blocks were."""
        scale_rows = (self.first + ids) // self.block_n
        return type(self)(self.words[ids], self.k, self.scales[scale_rows], 1, self.block_k)

    def copy_rows(self, source: Self, ids: Tensor) -> None:
        """Copy the outputs with these ids [N] of a weight whose blocks may have more rows.

        Raises ValueError where a block of this weight would need several scales.
        """
        sources = ids // source.block_n
        blocks = sources[:: self.block_n]
        if not torch.equal(blocks.repeat_interleave(self.block_n)[: len(ids)], sources):
            raise ValueError(f"the rows cut scale blocks of {source.block_n} rows")
        self.words.copy_(source.words[ids])
        self.scales.copy_(source.scales[blocks])

    def reorder(self, order: Tensor) -> None:
        """Move output order[i] to i, in place.

        Raises ValueError unless the order moves whole blocks of rows. A block that is shared with
        rows outside of this weight must stay.
        """
        n = self.words.shape[0]
        targets = (self.first + torch.arange(n, device=self.device)) // self.block_n
        sources = (self.first + order) // self.block_n
        moved = torch.arange(len(self.scales), device=self.device)
        moved[targets] = sources
        fixed = [0] if self.first else []
        if (self.first + n) % self.block_n:
            fixed.append(len(self.scales) - 1)
        if not torch.equal(moved[targets], sources) or any(int(moved[i]) != i for i in fixed):
            raise ValueError(f"the row order cuts scale blocks of {self.block_n} rows")
        self.words.copy_(self.words[order])
        self.scales.copy_(self.scales[moved])


def e4m3_values(codes: Tensor) -> Tensor:
    """Convert uint8 codes of e4m3fn to fp32."""
    return codes.view(torch.float8_e4m3fn).float()
