"""linear by cuBLAS: one product per segment, the partials added along the tree.

cuBLAS promises the same bits from run to run, and no tree: it picks a kernel by the shapes, and
some kernels split K. So it is never chosen for its traits; lockstep.kernels.linear.probe
finds the numbers of rows at which it gives the op's bits.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.linear import linear, pad_partitions, write_out
from lockstep.kernels.linear.triton import fold

UNCHOSEN = "its bits are known only where a probe compared them"


def _supports(**traits: Any) -> str | None:
    if traits.get("dtype", torch.bfloat16) == torch.float32:
        return "it serves bf16 and fp16"
    if traits.get("quantized"):
        return "the weight is packed"
    return gpu_trait(**traits)


@linear.backend("cublas", supports=_supports, opt_in_reason=UNCHOSEN)
def linear_cublas(
    x: Tensor,
    weight: Tensor,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.linear, for bf16 and fp16. x and weight are contiguous."""
    if split_k == 1:
        return write_out(torch.mm(x, weight.t()), out)
    x, weight = pad_partitions(x, weight, split_k)
    runs = (split_k, x.shape[1] // split_k)
    left = x.unflatten(1, runs).transpose(0, 1)
    right = weight.unflatten(1, runs).permute(1, 2, 0)
    parts = torch.bmm(left, right, out_dtype=torch.float32)
    return parts if allow_partials and out is None else write_out(fold(parts, x.dtype), out)
