"""Mixtures that every backend must serve.

Odd widths, no rows, few tokens and many, one expert for all tokens, a shared expert with and
without its gate; quantized weights.
"""

from collections.abc import Iterator
from typing import Any

import torch

from lockstep.kernels.experts import count_experts
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.cases import random_weights
from lockstep.kernels.route import route

SHAPES = (
    (0, 8, 4, 16, 2, ""),
    (2, 48, 33, 12, 3, "shared"),
    (3, 40, 70, 12, 3, "relu2"),
    (15, 24, 12, 6, 4, "gated"),
    (1, 40, 24, 5, 2, ""),
    (7, 33, 16, 44, 3, ""),
    (20, 40, 16, 7, 1, "one"),
    (9, 33, 50, 5, 2, "relu2"),
    (1, 40, 24, 5, 2, "partials"),
    (6, 33, 16, 7, 3, "partials"),
)
"""(tokens, H, I, experts, top_k, variant)."""
GATED = ("gated", "partials")
"""Variants with a gate of the shared expert; in "partials" its output is a linear's partials."""
QUANTIZED = (
    ("int4", "int4"),
    ("fp8 by blocks", "fp8 by blocks"),
    ("nvfp4", "int8"),
    ("Q4_K", "Q6_K"),
)
"""Weight formats of up and down."""
QUANTIZED_SHAPES = ((2, 136, 72, 3, 2, "gated"), (7, 40, 24, 4, 3, ""), (5, 136, 72, 3, 2, "relu2"))
"""Like SHAPES: some columns past a block of 128; scale blocks shared by several experts."""


def experts_cases(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments of experts on the CPU).

    Variants: "relu2" has that activation, without a gate; "one" sends all tokens to one expert, by
    an id out of range. Shared gates are strided, as in one product with a router's logits.
    """
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        yield _case(dtype, generator, *shape)
    for shape in QUANTIZED_SHAPES:
        hidden, inner, count = shape[1:4]
        rows = inner if shape[5] == "relu2" else 2 * inner
        ups = dict(random_weights(count * rows, hidden))
        downs = dict(random_weights(count * hidden, inner))
        for up, down in QUANTIZED:
            name, arguments = _case(dtype, generator, *shape)
            yield f"{up}, {down} {name}", arguments | dict(up=ups[up], down=downs[down])


def _case(
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    hidden: int,
    inner: int,
    count: int,
    top_k: int,
    variant: str,
) -> tuple[str, dict[str, Any]]:
    """Return (name, arguments) of one shape."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = inner if variant == "relu2" else 2 * inner
    ids, weights, *_ = route(random(tokens, count), top_k)
    if variant == "one":
        ids.fill_(count + 3)
    arguments = dict(
        x=random(tokens, hidden).to(dtype),
        up=(random(count, rows, hidden) * hidden**-0.5).to(dtype),
        down=(random(count, hidden, inner) * inner**-0.5).to(dtype),
        ids=ids,
        weights=weights,
        shared=random(tokens, hidden).to(dtype) if variant in ("shared", "gated") else None,
        shared_gate=random(tokens, 5).to(dtype)[:, 2] if variant in GATED else None,
        act="relu2" if variant == "relu2" else "silu_mul",
    )
    if variant == "partials":
        arguments["shared"] = random(4, tokens, hidden)
    return f"{tokens}x{hidden}/{inner}/{count}/{top_k} {variant}".rstrip(), arguments


def experts_traits(
    up: torch.Tensor | QuantizedWeight, down: torch.Tensor | QuantizedWeight, ids: torch.Tensor,
    **rest: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the traits by which a layer with such arguments chooses a backend."""
    quantized = isinstance(up, QuantizedWeight) or isinstance(down, QuantizedWeight)
    return dict(experts=count_experts(up, down), top_k=ids.shape[1], quantized=quantized)
