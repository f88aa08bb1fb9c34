"""linear on a CPU by Numba kernels: weights are read once, in their own dtype, from one call."""

from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.linear import dequantized, linear, partition_length, tree_sum, write_out
from lockstep.kernels.linear.cpu import linear_cpu  # noqa: F401 - registered before this backend
from lockstep.kernels.linear.prepacked import PrepackedWeight, dequantizes, fits_tiles
from lockstep.kernels.linear.tiled import TiledQuantizedWeight, TiledWeight


@linear.backend("numba", supports=numba_trait)
def linear_numba(
    x: Tensor,
    weight: Tensor | QuantizedWeight | PrepackedWeight,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear. The order of a partition is that of ColumnTiles."""
    if isinstance(weight, PrepackedWeight):
        return weight.multiply(x, out)
    if (
        isinstance(weight, QuantizedWeight)
        and split_k == 1
        and dequantizes("numba", x.dtype)
        and fits_tiles(weight)
    ):
        return TiledQuantizedWeight(weight).multiply(x, out)
    weight = dequantized(weight, x.dtype)
    if split_k == 1:
        return TiledWeight(weight).multiply(x, out)
    length = partition_length(x.shape[1], split_k)
    pairs = zip(x.float().split(length, dim=1), weight.float().split(length, dim=1), strict=True)
    total = tree_sum([TiledWeight(part).multiply(columns) for columns, part in pairs])
    return write_out(total.to(weight.dtype), out)
