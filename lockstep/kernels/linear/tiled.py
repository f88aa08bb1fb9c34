"""Weights in column tiles for Numba kernels: one ascending FMA chain per output."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.formats.weights import QuantizedWeight, unpack_codes
from lockstep.kernels.linear.numba_kernels import TILE, linear_bf16, linear_f16, linear_f32
from lockstep.kernels.linear.prepacked import PrepackedWeight, fits_tiles
from lockstep.kernels.linear.quantized_numba_kernels import QUADS, make_kernel
from lockstep.kernels.simd.compiler import KernelTable
from lockstep.kernels.simd.strides import address, address_of_rows
from lockstep.kernels.simd.threads import split_range

KERNELS = KernelTable(
    {torch.float16: linear_f16, torch.bfloat16: linear_bf16, torch.float32: linear_f32}
)
quantized_kernel = cache(make_kernel)
"""Kernel of (bits of a code, whether there are minima)."""


def to_tiles(rows: Tensor) -> Tensor:
    """Return rows [N, M] as tiles [N / TILE, M, TILE]. Rows past N are zeros."""
    filled = F.pad(rows, (0, 0, 0, -len(rows) % TILE))
    return filled.view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()


def from_tiles(tiles: Tensor, n: int) -> Tensor:
    """Return the rows [n, M] of tiles: the inverse of to_tiles."""
    return tiles.transpose(1, 2).reshape(-1, tiles.shape[1])[:n]


def _swap_word_dims(words: Tensor, outer: int, inner: int) -> Tensor:
    """Swap the two dimensions of the words of 128 columns: [N, B * outer * inner]."""
    return words.reshape(len(words), -1, outer, inner).transpose(2, 3).flatten(1)


class ColumnTiles(PrepackedWeight):
    """A weight [N, K] in tiles of TILE outputs.

    An output is acc = fma(x[k], w[k], acc) over ascending k, from 0, in fp32, rounded once. Neither
    rows nor columns enter, so a row has the same bits in every batch, and an output in every slice.

    kernel: takes the address of x, the operands, the address of the output, the sizes, and a range
    of tiles. operands: addresses and sizes of the stored weight.
    """

    kernel: Callable[..., None]

    @property
    @abstractmethod
    def operands(self) -> Sequence[int]:
        """Return the kernel's arguments that describe the weight."""

    def define(self, x: Tensor) -> Tensor:
        """See PrepackedWeight.

        The sum of an fp32 number and a product, rounded from fp64, is an FMA except for double
        rounding, which takes a chance of 2^-29 per addition with fp32 factors and none with 16-bit
        factors.
        """
        columns = x.double().t()
        weights = self.plain().double().t()
        acc = torch.zeros(len(x), self.shape[0])
        for x_k, w_k in zip(columns, weights, strict=True):
            acc = (acc.double() + x_k[:, None] * w_k).float()
        return acc.to(self.dtype)

    def multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See PrepackedWeight."""
        n, k = self.shape
        rows, columns = x.shape
        if columns != k:
            raise ValueError(f"x: {columns} columns; the weight has {k}")
        if out is None:
            out = torch.empty(rows, n, dtype=self.dtype)
        out_address, out_stride = address_of_rows("out", out, self.dtype, rows, n)
        wide = x.float().contiguous()
        sizes = (out_address, rows, n, k, out_stride)
        arguments = (address("x", wide, torch.float32, rows * k), *self.operands, *sizes)
        split_range(-(-n // TILE), lambda begin, end: self.kernel(*arguments, begin, end))
        return out


class TiledWeight(ColumnTiles):
    """A weight in tiles [N / TILE, K, TILE], in the dtype of the plain weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape, weight.dtype)
        self.tiles = to_tiles(weight)
        self.kernel = KERNELS[weight.dtype]
        self.nbytes = weight.nbytes

    @property
    def operands(self) -> Sequence[int]:
        return (self.tiles.data_ptr(),)

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        return from_tiles(self.tiles, self.shape[0])


class TiledQuantizedWeight(ColumnTiles):
    """A quantized weight of an fp32 model, in tiles of words, and of scales and offsets per group.

    Its bits are those of the TiledWeight of its dequantized values.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__(weight.shape, torch.float32)
        codes = weight.grouped()
        assert codes is not None and fits_tiles(weight), "else it is dequantized when loaded"
        self.words = to_tiles(_swap_word_dims(codes.words, QUADS, codes.bits))
        # Kernels add the negative of a minimum.
        offsets = -codes.offsets if codes.minima else codes.offsets
        self.scales = torch.stack([to_tiles(codes.scales), to_tiles(offsets)], 2)
        self.bits = codes.bits
        self.group = codes.group
        self.minima = codes.minima
        self.kernel = quantized_kernel(codes.bits, codes.minima)
        self.nbytes = codes.words.nbytes + codes.scales.nbytes + codes.offsets.nbytes

    @property
    def operands(self) -> Sequence[int]:
        return (self.words.data_ptr(), self.scales.data_ptr(), self.group)

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        n, k = self.shape
        words = _swap_word_dims(from_tiles(self.words, n), self.bits, QUADS)
        codes = unpack_codes(words, self.bits, k).float()
        scales, offsets = (
            from_tiles(numbers, n).repeat_interleave(self.group, 1)[:, :k]
            for numbers in self.scales.unbind(2)
        )
        return codes * scales + offsets if self.minima else (codes - offsets) * scales
