"""linear on a CPU: in row tiles of the sizes that give the reference's bits here, on all threads.

It is fast where the weight is a transposed view of [K, N] storage, as BuildContext.matrix lays it
out.
"""

from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized, linear, partition_length, tree_sum, write_out
from lockstep.kernels.linear.prepacked import LibraryWeight, PrepackedWeight


@linear.backend("cpu", supports=cpu_trait)
def linear_cpu(
    x: Tensor,
    weight: Tensor | QuantizedWeight | PrepackedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear."""
    if isinstance(weight, PrepackedWeight):
        return weight.multiply(x, out)
    weight = dequantized(weight, x.dtype)
    length = partition_length(x.shape[1], split_k)
    pairs = zip(x.float().split(length, dim=1), weight.split(length, dim=1), strict=True)
    total = tree_sum([LibraryWeight(part).mm(columns) for columns, part in pairs])
    return write_out(total.to(weight.dtype), out)
