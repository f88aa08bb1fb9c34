"""linear on a CPU: row tiles whose sizes give the reference's bits here, on all threads.

It is fast where the weight is a transposed view of [K, N] storage, as Build.matrix allocates it.
"""

from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized, linear, partition_length, tree_sum, write_out
from lockstep.kernels.row_tiles import tiled_mm


@linear.backend("cpu", supports=cpu_trait)
def linear_cpu(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.contract.linear."""
    weight = dequantized(weight, x.dtype)
    if not weight.t().is_contiguous():
        weight = weight.t().contiguous().t()
    rows = x.float()
    columns = weight.float().t()
    if split_k == 1:
        return write_out(tiled_mm(rows, columns).to(weight.dtype), out)
    run = partition_length(x.shape[1], split_k)
    pairs = zip(rows.split(run, dim=1), columns.split(run), strict=True)
    total = tree_sum([tiled_mm(a, b) for a, b in pairs])
    return write_out(total.to(weight.dtype), out)
