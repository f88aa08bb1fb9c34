"""Batches of both Gated DeltaNet laws that every backend must serve. Unused slots are NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import GatedDeltaWeights
from lockstep.kernels.recurrent.cases import Dims, chunk_places, random_state, step_places
from lockstep.kernels.recurrent.state import RecurrentState

LAYERS = (
    Dims(1, 1, 16, 16),
    Dims(1, 3, 24, 40, r=2, state=torch.bfloat16),
    Dims(2, 4, 32, 16),
    Dims(1, 3, 24, 40, r=2),
    Dims(2, 8, 64, 32),
    Dims(2, 4, 32, 16, state=torch.bfloat16),
)


def weights(dims: Dims, dtype: torch.dtype, seed: int) -> GatedDeltaWeights:
    """A layer's weights: log decays mostly between -1 and 0."""
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
    """mixed, z, b and a, of shape [*tokens, ...]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator).to(dtype)

    return dict(
        mixed=normal(dims.channels), z=normal(dims.hv, dims.v), b=normal(dims.hv), a=normal(dims.hv)
    )


def gated_delta_step_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] = LAYERS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of gated_delta_step on the CPU): see step_places."""
    for i, dims in enumerate(layers):
        for length in (1, dims.w):
            places = step_places(dims, dtype, i)
            rows = len(places["slots"])
            raw = inputs(dims, (rows, length), dtype, i)
            yield f"{dims}, Q={length}", dict(**raw, weights=weights(dims, dtype, i), **places)


def gated_delta_chunk_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] = LAYERS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of gated_delta_chunk on the CPU): see chunk_places."""
    for i, dims in enumerate(layers):
        places = chunk_places()
        raw = inputs(dims, (int(places["cu_seqlens"][-1]),), dtype, i)
        raw.pop("z")
        state = random_state(dims, 12, [2, 3, 4, 9], dtype, i)
        yield str(dims), dict(**raw, weights=weights(dims, dtype, i), state=state, **places)


def gated_delta_step_traits(state: RecurrentState, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    key_heads, key_dim = state.k.shape[2:]
    value_heads, value_dim = state.u.shape[2:]
    return dict(key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, value_heads=value_heads)


gated_delta_chunk_traits = gated_delta_step_traits
