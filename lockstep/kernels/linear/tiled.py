"""Weights in column tiles for Numba kernels: one ascending FMA chain per output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.linear.numba_kernels import TILE, linear_bf16, linear_f16, linear_f32
from lockstep.kernels.linear.prepacked import PrepackedWeight
from lockstep.kernels.simd.threads import split_range

KERNELS = {torch.float16: linear_f16, torch.bfloat16: linear_bf16, torch.float32: linear_f32}


class TiledWeight(PrepackedWeight):
    """A weight [N, K] in tiles [N / TILE, K, TILE], in the dtype of the plain weight.

    An output is acc = fma(x[k], w[k], acc) over ascending k, from 0, in fp32, rounded once. Neither
    rows nor columns enter, so a row has the same bits in every batch, and an output in every slice.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        k = weight.shape[1]
        filled = F.pad(weight, (0, 0, 0, -weight.shape[0] % TILE))
        self.tiles = filled.view(-1, TILE, k).transpose(1, 2).contiguous()
        self.kernel = KERNELS[weight.dtype]
        self.nbytes = weight.nbytes

    def plain(self) -> Tensor:
        """See PrepackedWeight."""
        n, k = self.shape
        return self.tiles.transpose(1, 2).reshape(-1, k)[:n]

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
        rows = len(x)
        if out is None:
            out = torch.empty(rows, n, dtype=self.dtype)
        assert x.shape[1] == k and out.shape == (rows, n) and out.dtype == self.dtype
        wide = x.float().contiguous()
        operands = (wide.data_ptr(), self.tiles.data_ptr(), out.data_ptr(), rows, n, k)
        stride = out.stride(0)
        split_range(len(self.tiles), lambda begin, end: self.kernel(*operands, stride, begin, end))
        return out
