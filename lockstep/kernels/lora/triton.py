"""Launcher of lora in Triton."""

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.integers import ceil_div
from lockstep.kernels.lora import RANK_BLOCK, lora
from lockstep.kernels.lora.kernels import lora_expand_kernel, lora_shrink_kernel

BLOCK_K = 128
BLOCK_N = 128
WARPS = 4
"""Warps per CTA: 16 fp32 accumulators per thread."""


@lora.backend("triton", supports=gpu_trait)
def lora_triton(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    parts: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    """See lockstep.kernels.lora.contract.lora."""
    tokens, columns = y.shape
    if not y.numel():
        return y
    num_parts = scales.shape[1]
    rank = b.shape[1]
    hidden = torch.empty(tokens, num_parts * rank, dtype=torch.float32, device=y.device)
    # No FMA may be contracted: the product and the sum are rounded as the contract says.
    options: dict[str, Any] = dict(num_warps=WARPS, enable_fp_fusion=False)
    lora_shrink_kernel[tokens, num_parts, rank // RANK_BLOCK](
        x, a, scales, adapter_ids, hidden, x.stride(0),
        num_parts, rank, x.shape[1], RANK_BLOCK, BLOCK_K, **options,
    )  # fmt: skip
    lora_expand_kernel[tokens, ceil_div(columns, BLOCK_N)](
        y, hidden, b, scales, parts, adapter_ids,
        num_parts, rank, columns, RANK_BLOCK, BLOCK_N, **options,
    )  # fmt: skip
    return y
