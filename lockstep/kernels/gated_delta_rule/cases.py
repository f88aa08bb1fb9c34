"""Batches of both Gated DeltaNet laws that every backend must serve. Unused slots are NaN."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import GatedDeltaState, GatedDeltaWeights
from lockstep.kernels.recurrent.rings import ring_slots, state_grid


@dataclass(frozen=True)
class Dims:
    """Heads and widths of a layer: HK, HV, K, V, R (conv kernel - 1), W (window), flush; and the
    dtype of its recurrent state in memory."""

    hk: int
    hv: int
    k: int
    v: int
    r: int = 3
    w: int = 4
    flush: int = 1
    state: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        return 2 * self.hk * self.k + self.hv * self.v

    @property
    def grid(self) -> int:
        """The state's grid."""
        return state_grid(self.state)

    @property
    def most(self) -> int:
        """The most tokens that a state lacks."""
        return max(self.flush, self.grid) - 1 + self.w


LAYERS = (
    Dims(1, 1, 16, 16),
    Dims(1, 3, 24, 40, r=2, state=torch.bfloat16),
    Dims(2, 4, 32, 16),
    Dims(1, 3, 24, 40, r=2),
    Dims(2, 8, 64, 32),
    Dims(2, 4, 32, 16, state=torch.bfloat16),
)


def empty_state(dims: Dims, slots: int, dtype: torch.dtype, fill: float = 0.0) -> GatedDeltaState:
    """A state of `slots` slots; conv is of `dtype`, recurrent as dims say, the rest fp32."""

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots, *shape), fill, dtype=dtype)

    length = ring_slots(dims.w, dims.r, dims.flush, dims.grid)
    return GatedDeltaState(
        recurrent=full(dims.hv, dims.k, dims.v, dtype=dims.state),
        conv=full(length, dims.channels, dtype=dtype),
        u=full(length, dims.hv, dims.v),
        k=full(length, dims.hk, dims.k),
        decay=full(length, dims.hv),
    )


def random_state(
    dims: Dims, slots: int, used: list[int], dtype: torch.dtype, seed: int
) -> GatedDeltaState:
    """A state whose `used` slots hold plausible numbers and whose other slots hold NaN."""
    state = empty_state(dims, slots, dtype, fill=float("nan"))
    generator = torch.Generator().manual_seed(seed)
    for part in state.tensors():
        shape = (len(used), *part.shape[1:])
        part[used] = (torch.randn(shape, generator=generator) * 0.3).to(part.dtype)
    state.decay[used] = torch.exp(-state.decay[used].abs())
    return state


def poison(state: GatedDeltaState, slot: int, start: int, history: int, lacking: int) -> None:
    """NaN in every ring slot that a window at `start` must not read."""
    for part in state.tensors()[1:]:
        live = history if part is state.conv else lacking
        ring_slots = torch.arange(start, start + part.shape[1] - live) % part.shape[1]
        part[slot, ring_slots] = float("nan")


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
    """(name, arguments of gated_delta_step on the CPU): states that lack no token to as many as may
    be, windows and replays across their grid, slots out of order, rings that wrap around, NaN where
    nothing may be read."""
    for i, dims in enumerate(layers):
        for length in (1, dims.w):
            slots = [4, 1, 6, 3, 2]
            lacking = [0, 1, 2, dims.w, dims.w - 1]
            starts = [1, 2, 77, 1000, 64]
            if dims.grid > 1:
                lacking = [0, 1, dims.most, dims.w, dims.grid]
                starts = [14, 20, 66, 1007, 64]
            state = random_state(dims, 8, slots, dtype, i)
            for slot, start, count in zip(slots, starts, lacking, strict=True):
                poison(state, slot, start, dims.r, count)
            first = torch.tensor(starts, dtype=torch.int32)
            yield (
                f"{dims}, Q={length}",
                dict(
                    **inputs(dims, (5, length), dtype, i),
                    weights=weights(dims, dtype, i),
                    state=state,
                    slots=torch.tensor(slots),
                    starts=first,
                    folded=first - torch.tensor(lacking, dtype=torch.int32),
                ),
            )


def gated_delta_chunk_cases(
    dtype: torch.dtype, layers: tuple[Dims, ...] = LAYERS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of gated_delta_chunk on the CPU): fresh and resumed rows, an empty one, a
    null one, rows shorter than the convolution, snapshots."""
    lengths = [70, 0, 128, 2, 5, 64, 1]
    starts = [0, 64, 64, 128, 0, 0, 0]
    sources = [1, 2, 3, 9, 0, 5, 6]
    slots = [1, 2, 3, 4, 0, 5, 6]
    snapshots = [7, 0, 8, 0, 0, 10, 11]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for i, dims in enumerate(layers):
        raw = inputs(dims, (sum(lengths),), dtype, i)
        yield (
            str(dims),
            dict(
                **{name: raw[name] for name in ("mixed", "b", "a")},
                weights=weights(dims, dtype, i),
                state=random_state(dims, 12, [2, 3, 4, 9], dtype, i),
                cu_seqlens=ints([0, *lengths]).cumsum(0, dtype=torch.int32),
                starts=ints(starts),
                state_src=ints(sources),
                state_slots=ints(slots),
                snapshot_slots=ints(snapshots),
            ),
        )


def gated_delta_step_traits(state: GatedDeltaState, **rest: Any) -> dict[str, Any]:
    """What a layer of such arguments says when it asks for a backend."""
    key_heads, key_dim = state.k.shape[2:]
    value_heads, value_dim = state.u.shape[2:]
    return dict(key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, value_heads=value_heads)


gated_delta_chunk_traits = gated_delta_step_traits
