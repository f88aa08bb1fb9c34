"""head_linear on a CPU: head by head, in row tiles that give the reference's bits here.

It is fast where weight is a transposed view of [H, K, N] storage.
"""

import torch
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.row_tiles import tiled_linear


@head_linear.backend("cpu", supports=cpu_trait)
def head_linear_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """See lockstep.kernels.head_linear.contract.head_linear."""
    return torch.stack([tiled_linear(x[:, h], w) for h, w in enumerate(weight)], 1)
