"""linear on a CPU: a prepacked weight, in tiles of rows that give the reference's bits here.

Layers prepack their weights when they are loaded; a plain weight is prepacked at every call.
"""

from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.formats.weights import PackedWeight
from lockstep.kernels.linear import linear, placed, run_length, tree_sum, unpacked
from lockstep.kernels.linear.prepacked import PrepackedWeight


@linear.backend("cpu", supports=cpu_trait)
def linear_cpu(
    x: Tensor,
    weight: Tensor | PackedWeight | PrepackedWeight,
    segments: int = 1,
    partial: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear."""
    if isinstance(weight, PrepackedWeight):
        return placed(weight.mm(x.float()).to(weight.dtype), out)
    weight = unpacked(weight, x.dtype)
    run = run_length(x.shape[1], segments)
    pairs = zip(x.float().split(run, dim=1), weight.split(run, dim=1), strict=True)
    total = tree_sum([PrepackedWeight(columns).mm(part) for part, columns in pairs])
    return placed(total.to(weight.dtype), out)
