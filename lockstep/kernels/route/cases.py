"""Inputs of route that every backend must serve.

Each family's scoring, odd numbers of experts, no rows; a shared expert of either activation, in one
GEMM with the logits and in a separate one; partials of a linear.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
"""Keyword arguments of route."""
SHAPES: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (0, 8, 2, {}),
    (3, 4, 1, {}),
    (5, 30, 6, {"renormalize": False}),
    (7, 256, 8, {}),
)
"""(tokens, experts, top_k, other arguments)."""
INNER = 530
"""Width of the shared expert: more than the columns of one CTA."""
SIGMOID: Arguments = dict(scoring="sigmoid", scale=2.5)
BIASED = (
    (4, 64, 6, SIGMOID),
    (3, 48, 5, SIGMOID | {"groups": 6, "top_groups": 3}),
    (2, 512, 22, SIGMOID | {"renormalize": False}),
    (3, 40, 10, SIGMOID | {"groups": 4, "top_groups": 1}),
)
"""Routings with a correction bias: DeepSeek's groups, Nemotron's 22 of 512; groups that are no
power of two, and one whose members are all chosen."""


def route_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of route on the CPU).

    Rows of logits are strided, as in one product with a shared expert's gate; every second row has
    equal logits.
    """
    generator = torch.Generator().manual_seed(2)
    for tokens, experts, top_k, more in (*SHAPES, *BIASED):
        logits = torch.randn(tokens, experts, generator=generator) * 2
        logits[1::2, ::3] = 1.0
        unread = torch.full((tokens, 1), float("nan"))
        logits = torch.cat([logits, unread], 1).to(dtype)[:, :experts]
        bias = torch.randn(experts, generator=generator) * 0.1 if "scoring" in more else None
        alone = dict(bias=bias, shared=None, shared_gate=None)
        yield f"{tokens}x{experts}/{top_k}", dict(logits=logits, top_k=top_k, **alone, **more)
    plain: Arguments = dict(bias=None, shared=None, shared_gate=None)
    logits = torch.randn(3, 16, generator=generator).to(dtype)
    yield "rounded", plain | dict(logits=logits, top_k=4, dtype=dtype)
    partials = torch.randn(4, 3, 24, generator=generator)
    yield "partials", plain | dict(logits=partials, top_k=5, **SIGMOID)
    for parts in ((), (2,)):
        product = torch.randn(*parts, 5, 2 * INNER + 24 + 1, generator=generator) * 2
        product = product if parts else product.to(dtype)
        shared, logits, gate = product.split((2 * INNER, 24, 1), dim=-1)
        joined: Arguments = dict(logits=logits, shared=shared, shared_gate=gate, top_k=3)
        yield f"gated, one GEMM {parts}", plain | joined | dict(dtype=dtype, shared_dtype=dtype)
        wide = torch.randn(*parts, 5, INNER + 3, generator=generator) * 2
        wide = (wide if parts else wide.to(dtype))[..., :INNER]
        logits = torch.randn(4, 5, 24, generator=generator)
        separate: Arguments = dict(
            logits=logits, shared=wide, act="relu2", top_k=6, shared_dtype=dtype
        )
        yield f"relu2, separate GEMM {parts}", plain | separate | SIGMOID


def route_traits(logits: Tensor, **rest: Any) -> dict[str, Any]:
    """Return the traits by which a layer with such arguments chooses a backend."""
    return dict(experts=logits.shape[-1])
