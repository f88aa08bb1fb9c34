"""linear on a CPU: in row tiles of the sizes that give the reference's bits here, on all threads.

It is fast where the weight is a transposed view of [K, N] storage, as Build.matrix lays it out.
"""

from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.linear import linear, placed, tree_sum, unpacked
from lockstep.kernels.packed import PackedWeight
from lockstep.kernels.row_tiles import tiled_mm


@linear.backend("cpu", supports=cpu_trait)
def linear_cpu(
    x: Tensor,
    weight: Tensor | PackedWeight,
    segments: int = 1,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear."""
    weight = unpacked(weight, x.dtype)
    if not weight.t().is_contiguous():
        weight = weight.t().contiguous().t()
    run = x.shape[1] // segments
    rows = x.float().split(run, dim=1)
    columns = weight.float().t().split(run)
    total = tree_sum([tiled_mm(a, b) for a, b in zip(rows, columns, strict=True)])
    return placed(total.to(x.dtype), out)
