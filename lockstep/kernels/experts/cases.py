"""Mixtures that every backend must serve: odd widths, no rows, few tokens and many, one expert for
all, a shared expert with and without its gate."""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.route import route

SHAPES = (
    (0, 8, 4, 16, 2, ""),
    (2, 48, 33, 12, 3, "shared"),
    (15, 24, 12, 6, 4, "gated"),
    (1, 40, 24, 5, 2, ""),
    (7, 33, 16, 44, 3, ""),
    (20, 40, 16, 7, 1, "one"),
)
"""(tokens, H, I, experts, top_k, what is special)."""


def experts_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of experts on the CPU). "one": all tokens go to one expert, by an id that is
    too large. The gates lie apart, as beside a router's logits."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for tokens, hidden, inner, count, top_k, special in SHAPES:
        ids, weights = route(random(tokens, count), top_k)
        if special == "one":
            ids.fill_(count + 3)
        yield (
            f"{tokens}x{hidden}/{inner}/{count}/{top_k} {special}".rstrip(),
            dict(
                x=random(tokens, hidden).to(dtype),
                up=(random(count, 2 * inner, hidden) * hidden**-0.5).to(dtype),
                down=(random(count, hidden, inner) * inner**-0.5).to(dtype),
                ids=ids,
                weights=weights,
                shared=random(tokens, hidden).to(dtype) if special in ("shared", "gated") else None,
                shared_gate=random(tokens, 5).to(dtype)[:, 2] if special == "gated" else None,
            ),
        )


def experts_traits(up: torch.Tensor, ids: torch.Tensor, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    return dict(experts=up.shape[0], top_k=ids.shape[1])
