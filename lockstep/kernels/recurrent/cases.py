"""What the cases of every recurrence are made of: sizes, states, and what must not be read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.recurrent.history import max_replayed, ring_slots, state_grid
from lockstep.kernels.recurrent.state import RecurrentState


@dataclass(frozen=True)
class Dims:
    """Heads and widths of a layer: HK, HV, K, V, R (conv kernel - 1), W (window), flush; and the
    dtype of its recurrent state in memory. Of Mamba-2 HK, HV, K and V are G, H, N and P."""

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
        return max_replayed(self.w, self.flush, self.grid)


def empty_state(dims: Dims, slots: int, dtype: torch.dtype, fill: float = 0.0) -> RecurrentState:
    """A state of `slots` slots; conv is of `dtype`, recurrent as dims say, the rest fp32."""

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots, *shape), fill, dtype=dtype)

    length = ring_slots(dims.w, dims.most)
    return RecurrentState(
        recurrent=full(dims.hv, dims.k, dims.v, dtype=dims.state),
        conv=full(ring_slots(dims.w, dims.r), dims.channels, dtype=dtype),
        u=full(length, dims.hv, dims.v),
        k=full(length, dims.hk, dims.k),
        decay=full(length, dims.hv),
    )


def random_state(
    dims: Dims, slots: int, used: list[int], dtype: torch.dtype, seed: int
) -> RecurrentState:
    """A state whose `used` slots hold plausible numbers and whose other slots hold NaN."""
    state = empty_state(dims, slots, dtype, fill=float("nan"))
    generator = torch.Generator().manual_seed(seed)
    for part in state.tensors():
        shape = (len(used), *part.shape[1:])
        part[used] = (torch.randn(shape, generator=generator) * 0.3).to(part.dtype)
    state.decay[used] = torch.exp(-state.decay[used].abs())
    return state


def poison(state: RecurrentState, slot: int, start: int, history: int, lacking: int) -> None:
    """NaN in every ring slot that a window at `start` must not read."""
    for part in state.tensors()[1:]:
        live = history if part is state.conv else lacking
        ring_slots = torch.arange(start, start + part.shape[1] - live) % part.shape[1]
        part[slot, ring_slots] = float("nan")


def step_places(dims: Dims, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """state, slots, starts and folded of a step: states that lack no token to as many as may be,
    windows and replays across their grid, slots out of order, rings that wrap around, NaN where
    nothing may be read."""
    slots = [4, 1, 6, 3, 2]
    lacking = [0, 1, 2, dims.w, dims.w - 1]
    starts = [1, 2, 77, 1000, 64]
    if dims.grid > 1:
        lacking = [0, 1, dims.most, dims.w, dims.grid]
        starts = [14, 20, 66, 1007, 64]
    state = random_state(dims, 8, slots, dtype, seed)
    for slot, start, count in zip(slots, starts, lacking, strict=True):
        poison(state, slot, start, dims.r, count)
    first = torch.tensor(starts, dtype=torch.int32)
    folded = first - torch.tensor(lacking, dtype=torch.int32)
    return dict(state=state, slots=torch.tensor(slots), starts=first, folded=folded)


def chunk_places() -> dict[str, Tensor]:
    """The rows of a prompt step: fresh and resumed ones, an empty one, a null one, rows shorter
    than the convolution, snapshots. They resume from slots 2, 3, 4 and 9 of 12."""
    lengths = [70, 0, 128, 2, 5, 64, 1]
    rows = dict(
        starts=[0, 64, 64, 128, 0, 0, 0],
        state_src=[1, 2, 3, 9, 0, 5, 6],
        state_slots=[1, 2, 3, 4, 0, 5, 6],
        snapshot_slots=[7, 0, 8, 0, 0, 10, 11],
    )
    bounds = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return dict(
        cu_seqlens=bounds,
        **{name: torch.tensor(values, dtype=torch.int32) for name, values in rows.items()},
    )


Raw = Callable[[Dims, tuple[int, ...], torch.dtype, int], dict[str, Tensor]]
"""dims, tokens, dtype and seed -> a layer's inputs, of shape [*tokens, ...]."""
Weights = Callable[[Dims, torch.dtype, int], Any]


def step_cases(
    inputs: Raw, weights: Weights, dtype: torch.dtype, layers: Sequence[Dims]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of a stepping law on the CPU): see step_places."""
    for i, dims in enumerate(layers):
        for length in (1, dims.w):
            places = step_places(dims, dtype, i)
            rows = len(places["slots"])
            raw = inputs(dims, (rows, length), dtype, i)
            yield f"{dims}, Q={length}", dict(**raw, weights=weights(dims, dtype, i), **places)


def chunk_cases(
    inputs: Raw, weights: Weights, dtype: torch.dtype, layers: Sequence[Dims]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of a chunked law on the CPU): see chunk_places."""
    for i, dims in enumerate(layers):
        places = chunk_places()
        raw = inputs(dims, (int(places["cu_seqlens"][-1]),), dtype, i)
        state = random_state(dims, 12, [2, 3, 4, 9], dtype, i)
        yield str(dims), dict(**raw, weights=weights(dims, dtype, i), state=state, **places)
