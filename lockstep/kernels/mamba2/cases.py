"""Test cases of mamba2_step and mamba2_chunk. Slots that nothing may read are NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.mamba2 import Mamba2Weights
from lockstep.kernels.recurrent.cases import Dims, chunk_cases, step_cases
from lockstep.kernels.recurrent.state import RecurrentState

LAYERS = (
    Dims(1, 2, 16, 16),
    Dims(1, 3, 24, 40, r=2, state=torch.bfloat16),
    Dims(2, 6, 20, 10),
    Dims(3, 3, 40, 24, r=2),
    Dims(2, 8, 64, 32),
    Dims(2, 4, 32, 16, state=torch.bfloat16),
    Dims(1, 2, 16, 16, w=16),
    Dims(1, 2, 16, 16, w=16, flush=5, state=torch.bfloat16),
)
"""G, H, N and P of each. Every other layer has limits of dt and no bias in its convolution."""
DT_LIMITS = (0.05, 0.6)


def weights(dims: Dims, dtype: torch.dtype, seed: int) -> Mamba2Weights:
    """Return random weights of a layer, with log decays mostly between -1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    plain = seed % 2 == 0
    return Mamba2Weights(
        conv=(normal(dims.r + 1, dims.channels) * 0.5).to(dtype).t(),
        conv_bias=(normal(dims.channels) * 0.3).to(dtype) if plain else None,
        a_log=normal(dims.hv),
        dt_bias=normal(dims.hv) - 1.0,
        d=1.0 + 0.3 * normal(dims.hv),
        **({} if plain else dict(dt_min=DT_LIMITS[0], dt_max=DT_LIMITS[1])),
    )


def inputs(dims: Dims, tokens: tuple[int, ...], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Return random mixed and dt of shape [*tokens, ...]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator).to(dtype)

    return dict(mixed=normal(dims.channels), dt=normal(dims.hv))


def mamba2_step_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield step_cases of `layers`, by default LAYERS."""
    return step_cases(inputs, weights, dtype, LAYERS if layers is None else layers)


def mamba2_chunk_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield chunk_cases of `layers`, by default LAYERS."""
    return chunk_cases(inputs, weights, dtype, LAYERS if layers is None else layers)


def mamba2_step_traits(state: RecurrentState, **rest: Any) -> dict[str, Any]:
    """Return the traits with which a layer of these arguments chooses a backend."""
    groups, state_dim = state.k.shape[2:]
    heads, head_dim = state.u.shape[2:]
    return dict(groups=groups, heads=heads, state_dim=state_dim, head_dim=head_dim)


mamba2_chunk_traits = mamba2_step_traits
