"""Routings that every backend must serve: each family's, odd numbers of experts, no rows; a shared
expert of either kind, beside the logits and apart; a linear's partials."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Given = dict[str, Any]
"""Arguments, by name."""
SHAPES: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (0, 8, 2, {}),
    (3, 4, 1, {}),
    (5, 30, 6, {"renormalize": False}),
    (7, 256, 8, {}),
)
"""(tokens, experts, top_k, what else is asked)."""
INNER = 530
"""Width of the shared expert: more than a program's columns."""
SIGMOID: Given = dict(scoring="sigmoid", scale=2.5)
BIASED = (
    (4, 64, 6, SIGMOID),
    (3, 48, 5, SIGMOID | {"groups": 6, "top_groups": 3}),
    (2, 512, 22, SIGMOID | {"renormalize": False}),
    (3, 40, 10, SIGMOID | {"groups": 4, "top_groups": 1}),
)
"""Those with a correction bias: DeepSeek's groups, Nemotron's 22 of 512; groups that are no power
of two, and one whose members are all chosen."""


def route_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of route on the CPU): lines that lie apart, as beside a shared expert's
    gate; equal logits in every second line."""
    generator = torch.Generator().manual_seed(2)
    for tokens, experts, top_k, more in (*SHAPES, *BIASED):
        logits = torch.randn(tokens, experts, generator=generator) * 2
        logits[1::2, ::3] = 1.0
        beside = torch.full((tokens, 1), float("nan"))
        logits = torch.cat([logits, beside], 1).to(dtype)[:, :experts]
        bias = torch.randn(experts, generator=generator) * 0.1 if "scoring" in more else None
        alone = dict(bias=bias, shared=None, shared_gate=None)
        yield f"{tokens}x{experts}/{top_k}", dict(logits=logits, top_k=top_k, **alone, **more)
    plain: Given = dict(bias=None, shared=None, shared_gate=None)
    logits = torch.randn(3, 16, generator=generator).to(dtype)
    yield "rounded", plain | dict(logits=logits, top_k=4, dtype=dtype)
    partials = torch.randn(4, 3, 24, generator=generator)
    yield "partials", plain | dict(logits=partials, top_k=5, **SIGMOID)
    for parts in ((), (2,)):
        product = torch.randn(*parts, 5, 2 * INNER + 24 + 1, generator=generator) * 2
        product = product if parts else product.to(dtype)
        shared, logits, gate = product.split((2 * INNER, 24, 1), dim=-1)
        joined: Given = dict(logits=logits, shared=shared, shared_gate=gate, top_k=3)
        yield f"gated, beside {parts}", plain | joined | dict(dtype=dtype, shared_dtype=dtype)
        wide = torch.randn(*parts, 5, INNER + 3, generator=generator) * 2
        wide = (wide if parts else wide.to(dtype))[..., :INNER]
        logits = torch.randn(4, 5, 24, generator=generator)
        apart: Given = dict(logits=logits, shared=wide, act="relu2", top_k=6, shared_dtype=dtype)
        yield f"relu2, apart {parts}", plain | apart | SIGMOID


def route_traits(logits: Tensor, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    return dict(experts=logits.shape[-1])
