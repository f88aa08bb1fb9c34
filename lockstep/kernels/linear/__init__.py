"""linear: y = x W^T with one fixed reduction tree per weight, whatever the number of rows."""

import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.tiles import tiled_mm


@op
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] of one dtype -> [T, N] of that dtype.

    Each output is one fp32 accumulation over K in ascending order, rounded once. The reference
    computes in fp32 in row tiles, so that a row's bits do not depend on T; it is fast where the
    weight is a transposed view of [K, N] storage, as Build.matrix lays it out on a CPU.
    """
    if not weight.t().is_contiguous():
        weight = weight.t().contiguous().t()
    return tiled_mm(x.float(), weight.float().t()).to(x.dtype)


def draft_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K] -> [T, N] with whatever tree is fastest: drafters need no exactness.

    On a CPU at one row of 256 x 1024: 24 us, against 41 us for a tile of 4 rows.
    """
    return F.linear(x, weight)
