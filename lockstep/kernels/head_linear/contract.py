"""head_linear: y_h = x_h W_h^T, one small linear map per head, for MLA's absorbed projections."""

import torch
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.row_tiles import tile_mm


@op(needed_for="latent attention (MLA)")
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x_h W_h^T for every head: [T, H, N], contiguous.

    Per head it is linear with one partition: one fp32 accumulation over K in ascending order,
    rounded once. On a CPU it runs in row tiles (lockstep.kernels.row_tiles). A row's bits do not
    depend on T.

    Args:
        x: [T, H, K], its last stride 1.
        weight: [H, N, K] of x's dtype.
    """
    outputs = [tile_mm(x[:, h].float(), w.float().t()).to(x.dtype) for h, w in enumerate(weight)]
    return torch.stack(outputs, 1)
