"""head_linear: y_h = x_h W_h^T, a small linear map for every head. MLA's absorbed projections."""

import torch
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tile_mm


@op
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, K], its last stride 1; weight [H, N, K] of x's dtype -> [T, H, N], contiguous.

    Per head what linear is with one segment: one fp32 accumulation over K in ascending order,
    rounded once. On a CPU it is taken by tiles of rows (lockstep.kernels.row_tiles). A row's bits
    do not depend on T.
    """
    found = [tile_mm(x[:, h].float(), own.float().t()).to(x.dtype) for h, own in enumerate(weight)]
    return torch.stack(found, 1)
