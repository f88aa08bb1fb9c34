"""Test cases of lora: adapters of several ranks, tokens without one, unchanged parts."""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.lora import padded_rank

SIZES = (
    (0, (8,), 16, (4,)),
    (1, (33,), 40, (1,)),
    (5, (24, 8, 9), 72, (16, 3)),
    (19, (130, 70), 200, (8, 17, 32)),
)
"""(tokens, columns of each part, K, rank of each adapter)."""


def lora_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of lora on the CPU).

    Adapter i leaves part i alone, where a layer has that many parts.
    """
    generator = torch.Generator().manual_seed(9)
    for tokens, widths, k, ranks in SIZES:
        columns = sum(widths)
        rank = padded_rank(max(ranks), "cuda")
        a = torch.zeros(len(ranks) + 1, len(widths), rank, k)
        b = torch.zeros(len(ranks) + 1, rank, columns)
        scales = torch.zeros(len(ranks) + 1, len(widths))
        for index, size in enumerate(ranks, 1):
            a[index, :, :size] = torch.randn(len(widths), size, k, generator=generator)
            b[index, :size] = torch.randn(size, columns, generator=generator)
            scales[index] = torch.rand(len(widths), generator=generator)
            scales[index, index : index + 1] = 0.0
        yield (
            f"{tokens}x{widths}x{k}, ranks {ranks}",
            dict(
                y=torch.randn(tokens, columns, generator=generator).to(dtype),
                x=torch.randn(tokens, k, generator=generator).to(dtype),
                a=a.flatten(1, 2).to(dtype),
                b=b.to(dtype),
                scales=scales,
                parts=torch.arange(len(widths)).repeat_interleave(torch.tensor(widths)).int(),
                adapter_ids=torch.arange(tokens).remainder(len(ranks) + 1).int(),
            ),
        )
