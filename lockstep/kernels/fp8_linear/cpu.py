"""fp8_linear on a CPU: in fp64, in which the sum of a block of products is exact.

So neither the library, its threads nor the number of rows changes a bit, and rows need no tiles.
"""

import torch
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight
from lockstep.kernels.fp8_linear import code_values, fp8_linear, quantize_rows
from lockstep.kernels.linear import partition_length, tree_sum, write_out
from lockstep.kernels.linear.prepacked import PrepackedWeight

MAX_SUMS = 1 << 22
"""Maximum sums of blocks that are in memory at once, as fp64."""


class WideFp8Weight(PrepackedWeight):
    """Fp8Weight whose codes are widened to fp64 once, when it is loaded: 8 bytes per value.

    dtype: of the model, which plain() returns. blocks: [B, K_BLOCK, N]. scales: one per row of the
    weight and block, or per row. split_k: number of split-K partitions.
    """

    def __init__(self, weight: Fp8Weight, dtype: torch.dtype, split_k: int = 1) -> None:
        super().__init__(weight.shape, dtype)
        self.weight = weight
        self.split_k = split_k
        padded = K_BLOCK * -(-weight.k // K_BLOCK)
        values = code_values(weight.words, padded)
        self.blocks = values.unflatten(1, (-1, K_BLOCK)).permute(1, 2, 0).contiguous()
        self.scales = weight.with_row_scales().scales
        self.nbytes = self.blocks.nbytes + self.scales.nbytes

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        return self.weight.dequantize(self.dtype)

    def define(self, x: Tensor) -> Tensor:
        """See PrepackedWeight."""
        product: Tensor = fp8_linear.reference(x, self.weight, self.split_k)
        return product

    def multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See PrepackedWeight."""
        blocks, _, n = self.blocks.shape
        rows = max(1, MAX_SUMS // (blocks * n))
        product = torch.cat([self._multiply_rows(part) for part in x.split(rows)])
        return write_out(product.to(x.dtype), out)

    def _multiply_rows(self, x: Tensor) -> Tensor:
        """Multiply a few rows x [T, K]. Returns [T, N] fp32."""
        weight = self.weight
        words, x_scales = quantize_rows(x, weight.block_k)
        values = code_values(words, self.blocks.shape[0] * K_BLOCK)
        sums = torch.bmm(values.unflatten(1, (-1, K_BLOCK)).transpose(0, 1), self.blocks).float()
        by_block = weight.block_k < weight.k
        if by_block:
            index = torch.arange(len(sums)) * K_BLOCK // weight.block_k
            sums = sums * x_scales.t()[index, :, None] * self.scales.t()[index, None]
        partials = []
        for part in sums.split(-(-partition_length(weight.k, self.split_k) // K_BLOCK)):
            total = torch.zeros(sums.shape[1:])
            for block in part:
                total += block
            partials.append(total if by_block else total * x_scales * self.scales[:, 0])
        return tree_sum(partials)


@fp8_linear.backend("cpu", supports=cpu_trait)
def fp8_linear_cpu(
    x: Tensor,
    weight: Fp8Weight | PrepackedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.fp8_linear.contract.fp8_linear."""
    if isinstance(weight, Fp8Weight):
        weight = WideFp8Weight(weight, x.dtype, split_k)
    return weight.multiply(x, out)
