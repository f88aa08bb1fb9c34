"""fp8_linear on a CPU: in fp64, in which the sum of a block of products is exact.

So neither the library, its threads nor the number of rows changes a bit, and rows need no tiles.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.fp8_linear import QuantizedRows, codes_of, fp8_linear, fused_sum
from lockstep.kernels.linear import partition_length, tree_sum, write_out
from lockstep.kernels.linear.prepacked import PrepackedWeight

MAX_SUMS = 1 << 22
"""Maximum sums of blocks that are in memory at once, as fp32."""
TILE_OUTPUTS = 2048
"""Outputs of a tile. A block of it takes 2 MB as fp64, which stay in the CPU's caches."""


class PrepackedFp8Weight(PrepackedWeight):
    """Fp8Weight with its codes as bf16, which represents each of them, in blocks of columns.

    A block of a tile is widened to fp64 just before its product, in the CPU's cache. 8.4 million
    weights took 3.3 ms of CPU time at one row and 8.2 at 8, on one AVX2 thread. Stored as fp64 they
    took 3.4 and 12.6 ms. Codes of 8 bits took 30 and 36, since torch widens them one by one.

    dtype: of the model, which plain() returns. split_k: number of split-K partitions. tiles:
    [B, K_BLOCK, TILE_OUTPUTS] bf16; the last one may have fewer outputs. scales: one per row of the
    weight and block, or per row.
    """

    def __init__(self, weight: Fp8Weight, dtype: torch.dtype, split_k: int = 1) -> None:
        super().__init__(weight.shape, dtype)
        self.split_k = split_k
        self.block_k = weight.block_k
        padded = F.pad(weight.codes(), (0, -weight.k % K_BLOCK))
        values = e4m3_values(padded).to(torch.bfloat16).unflatten(1, (-1, K_BLOCK))
        self.tiles = [rows.permute(1, 2, 0).contiguous() for rows in values.split(TILE_OUTPUTS)]
        self.scales = weight.with_row_scales().scales
        self.nbytes = sum(tile.nbytes for tile in self.tiles) + self.scales.nbytes

    @staticmethod
    def bytes_of(weight: Fp8Weight) -> int:
        """Return the bytes that a weight will take once it is prepacked."""
        n, k = weight.shape
        values = n * -(-k // K_BLOCK) * K_BLOCK
        scales = n * weight.scales.shape[1]
        return values * torch.bfloat16.itemsize + scales * torch.float32.itemsize

    def quantized(self) -> Fp8Weight:
        """Return the weight that was prepacked, with a scale per row."""
        rows = torch.cat([tile.flatten(0, 1).t() for tile in self.tiles])
        values = rows[:, : self.shape[1]].contiguous()
        return Fp8Weight.of(values.to(torch.float8_e4m3fn), self.scales, 1, self.block_k)

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        return self.quantized().dequantize(self.dtype)

    def define(self, x: Tensor | QuantizedRows) -> Tensor:
        """See PrepackedWeight."""
        product: Tensor = fp8_linear.reference(x, self.quantized(), self.split_k)
        return product

    def multiply(self, x: Tensor | QuantizedRows, out: Tensor | None = None) -> Tensor:
        """See PrepackedWeight."""
        rows = max(1, MAX_SUMS // (len(self.tiles[0]) * self.shape[0]))
        codes, scales = codes_of(x, self.block_k)
        parts = zip(codes.split(rows), scales.split(rows), strict=True)
        product = torch.cat([self._multiply_rows(*part) for part in parts])
        return write_out(product.to(x.dtype), out)

    def _multiply_rows(self, codes: Tensor, x_scales: Tensor) -> Tensor:
        """Multiply a few rows of codes [T, K]. Returns [T, N] fp32."""
        k = self.shape[1]
        sums = self._sums_of_blocks(codes)
        by_block = self.block_k < k
        length = -(-partition_length(k, self.split_k) // K_BLOCK)
        partials = []
        for first in range(0, len(sums), length):
            total = torch.zeros(sums.shape[1:])
            for block in range(first, min(first + length, len(sums))):
                if by_block:
                    scale = x_scales[:, block, None] * self.scales[:, block]
                    total = fused_sum(sums[block], scale, total)
                else:
                    total += sums[block]
            partials.append(total if by_block else total * (x_scales * self.scales[:, 0]))
        return tree_sum(partials)

    def _sums_of_blocks(self, codes: Tensor) -> Tensor:
        """Return the products of codes [T, K] with each block: [B, T, N] fp32, rounded once."""
        padded = F.pad(codes, (0, -codes.shape[1] % K_BLOCK))
        x_blocks = e4m3_values(padded).double().unflatten(1, (-1, K_BLOCK)).transpose(0, 1)
        sums = torch.empty(len(x_blocks), len(codes), self.shape[0])
        for tile, tile_sums in zip(self.tiles, sums.split(TILE_OUTPUTS, 2), strict=True):
            wide = torch.empty(tile.shape[1:], dtype=torch.float64)
            for x_block, block, target in zip(x_blocks, tile, tile_sums, strict=True):
                target.copy_(x_block @ wide.copy_(block))
        return sums


@fp8_linear.backend("cpu", supports=cpu_trait)
def fp8_linear_cpu(
    x: Tensor | QuantizedRows,
    weight: Fp8Weight | PrepackedFp8Weight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.fp8_linear.contract.fp8_linear."""
    if isinstance(weight, Fp8Weight):
        weight = PrepackedFp8Weight(weight, x.dtype, split_k)
    return weight.multiply(x, out)
