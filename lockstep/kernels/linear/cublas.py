"""linear by cuBLAS: one product per split-K partition, the partials added along the tree.

cuBLAS promises equal bits from run to run, but no reduction tree: it chooses kernels by shape, and
some of them split K. So traits alone never choose it; lockstep.kernels.linear.probe finds the
numbers of rows at which it gives the op's bits.
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.linear import linear, pad_partitions, write_out
from lockstep.kernels.linear.triton import reduce_partials

UNCHOSEN = "its bits are only known where a probe compared them"


def _supports(**traits: Any) -> str | None:
    if traits.get("dtype", torch.bfloat16) == torch.float32:
        return "it serves bf16 and fp16"
    if traits.get("quantized"):
        return "the weight is quantized"
    return gpu_trait(**traits)


@linear.backend("cublas", supports=_supports, opt_in_reason=UNCHOSEN)
def linear_cublas(
    x: Tensor,
    weight: Tensor,
    split_k: int = 1,
    allow_partials: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See lockstep.kernels.linear.contract.linear. x and weight are bf16 or fp16 and contiguous."""
    if split_k == 1:
        return write_out(torch.mm(x, weight.t()), out)
    x, weight = pad_partitions(x, weight, split_k)
    partitions = (split_k, x.shape[1] // split_k)
    x_parts = x.unflatten(1, partitions).transpose(0, 1)
    w_parts = weight.unflatten(1, partitions).permute(1, 2, 0)
    partials = torch.bmm(x_parts, w_parts, out_dtype=torch.float32)
    if allow_partials and out is None:
        return partials
    return write_out(reduce_partials(partials, x.dtype), out)
