"""Test cases of gated_delta_step and gated_delta_chunk. Slots that nothing may read are NaN."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import GatedDeltaWeights
from lockstep.kernels.recurrent.cases import Dims, Raw, chunk_cases, step_cases
from lockstep.kernels.recurrent.state import RecurrentState

LAYERS = (
    Dims(1, 1, 16, 16),
    Dims(1, 3, 24, 40, r=2, state=torch.bfloat16),
    Dims(2, 4, 32, 16),
    Dims(1, 3, 24, 40, r=2),
    Dims(2, 8, 64, 32),
    Dims(2, 4, 32, 16, state=torch.bfloat16),
    Dims(1, 2, 16, 16, w=16),
    Dims(1, 2, 16, 16, w=16, flush=5, state=torch.bfloat16),
)
"""HK, HV, K and V of each."""
PARTIALS = 8
"""Split-K partials of b and a."""


def weights(dims: Dims, dtype: torch.dtype, seed: int) -> GatedDeltaWeights:
    """Return random weights of a layer, with log decays mostly between -1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return GatedDeltaWeights(
        conv=(normal(dims.r + 1, dims.channels) * 0.5).to(dtype).t(),
        a_log=normal(dims.hv),
        dt_bias=normal(dims.hv) - 2.0,
        norm=(1.0 + 0.1 * normal(dims.v)).to(dtype),
        eps=1e-6,
    )


def inputs(dims: Dims, tokens: tuple[int, ...], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Return random mixed, z, b and a of shape [*tokens, ...]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator).to(dtype)

    return dict(
        mixed=normal(dims.channels), z=normal(dims.hv, dims.v), b=normal(dims.hv), a=normal(dims.hv)
    )


def chunk_inputs(
    dims: Dims, tokens: tuple[int, ...], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Return random inputs of a prompt: without z, since the chunked op does not gate."""
    raw = inputs(dims, tokens, dtype, seed)
    raw.pop("z")
    return raw


def with_partials(
    generate: Raw, dims: Dims, tokens: tuple[int, ...], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Return inputs of `generate` with split-K partials of b and a: columns of one product."""
    raw = generate(dims, tokens, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    product = torch.randn(PARTIALS, *tokens, 2 * dims.hv, generator=generator) / PARTIALS**0.5
    raw["b"], raw["a"] = product.split(dims.hv, dim=-1)
    return raw


def gated_delta_step_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield step_cases of `layers`, by default LAYERS, and those of the first with partials."""
    layers = LAYERS if layers is None else layers
    yield from step_cases(inputs, weights, dtype, layers)
    for name, arguments in step_cases(partial(with_partials, inputs), weights, dtype, layers[:1]):
        if arguments["committed"] is None:
            yield f"{name}, partials", arguments


def gated_delta_chunk_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield chunk_cases of `layers`, by default LAYERS, and those of the first with partials."""
    layers = LAYERS if layers is None else layers
    yield from chunk_cases(chunk_inputs, weights, dtype, layers)
    partials = partial(with_partials, chunk_inputs)
    for name, arguments in chunk_cases(partials, weights, dtype, layers[:1]):
        yield f"{name}, partials", arguments


def gated_delta_step_traits(state: RecurrentState, **rest: Any) -> dict[str, Any]:
    """Return the traits with which a layer of these arguments chooses a backend."""
    key_heads, key_dim = state.k.shape[2:]
    value_heads, value_dim = state.u.shape[2:]
    return dict(key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, value_heads=value_heads)


gated_delta_chunk_traits = gated_delta_step_traits
