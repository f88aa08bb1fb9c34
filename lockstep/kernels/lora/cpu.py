"""lora on a CPU: the tokens of one adapter together, in chunks that stay in the cache."""

import torch
from torch import Tensor

from lockstep.kernels.backends import cpu_trait
from lockstep.kernels.lora import halving_sum, lora

CHUNK = 1 << 18
"""Maximum fp32 products of one chunk of tokens: 1 MiB, half of a core's L2 cache."""


@lora.backend("cpu", supports=cpu_trait)
def lora_cpu(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    parts: Tensor,
    adapter_ids: Tensor,
) -> Tensor:
    """See lockstep.kernels.lora.contract.lora."""
    adapters = set(adapter_ids.tolist()) - {0}
    # Most steps have requests of the base model only.
    if not adapters:
        return y
    widths = torch.bincount(parts, minlength=scales.shape[1]).tolist()
    largest = max(a.shape[1] * a.shape[2], b.shape[1] * b.shape[2])
    for adapter in adapters:
        scale = scales[adapter]
        if not scale.any():
            continue
        tokens = (adapter_ids == adapter).nonzero().squeeze(1)
        by_column = scale[parts]
        wide_a = a[adapter].float()
        wide_b = b[adapter].float()
        for chunk in tokens.split(max(CHUNK // largest, 1)):
            hidden = halving_sum(x[chunk].float()[:, None] * wide_a, 2)
            # [T, P, R] -> [T, R, N]: each column takes the values of its part.
            by_part = hidden.view(len(chunk), len(scale), -1, 1).unbind(1)
            columns = [h.expand(-1, -1, width) for h, width in zip(by_part, widths, strict=True)]
            delta = halving_sum(torch.cat(columns, 2).mul_(wide_b), 1)
            base = y[chunk]
            changed = (base.float() + by_column * delta).to(y.dtype)
            y[chunk] = torch.where(by_column != 0, changed, base)
    return y
