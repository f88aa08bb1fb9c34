"""fp8_linear on a CPU: in fp64, in which the sum of a block of products is exact.

So neither the library, its threads nor the number of rows changes a bit, and rows need no tiles.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import K_BLOCK, Fp8Weight
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.fp8_linear import fp8_linear, row_codes
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
        self.blocks = _blocks_of(weight.codes()).transpose(1, 2).contiguous()
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
        codes, x_scales = row_codes(x, weight.block_k)
        sums = torch.bmm(_blocks_of(codes), self.blocks).float()
        by_block = weight.block_k < weight.k
        if by_block:
            sums = sums * (x_scales.t()[:, :, None] * self.scales.t()[:, None])
        partials = []
        for part in sums.split(-(-partition_length(weight.k, self.split_k) // K_BLOCK)):
            total = torch.zeros(sums.shape[1:])
            for block in part:
                total += block
            partials.append(total if by_block else total * (x_scales * self.scales[:, 0]))
        return tree_sum(partials)


def _blocks_of(codes: Tensor) -> Tensor:
    """Return the values [B, R, K_BLOCK] fp64 of codes [R, K], 0 past column K."""
    padded = F.pad(codes, (0, -codes.shape[1] % K_BLOCK))
    return e4m3_values(padded).double().unflatten(1, (-1, K_BLOCK)).transpose(0, 1)


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
