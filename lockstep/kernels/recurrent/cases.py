"""Sizes, states and rows of the test cases of all recurrences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.recurrent.history import history_length, max_replayed, state_grid
from lockstep.kernels.recurrent.state import RecurrentState

COMMITTED = (24, 1, 17, 4, 2)
"""Committed tokens of each row of step_rows in windows of 24 tokens."""


@dataclass(frozen=True)
class Dims:
    """Dimensions of a recurrent layer: HK, HV, K, V, R (convolution kernel - 1), W (max window).

    For Mamba-2, HK, HV, K and V are G, H, N and P. flush: see next_folded. state: dtype of the
    state in memory.
    """

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
        """Channels of the convolution."""
        return 2 * self.hk * self.k + self.hv * self.v

    @property
    def grid(self) -> int:
        """Grid of the state: see state_grid."""
        return state_grid(self.state)

    @property
    def max_replayed(self) -> int:
        """Maximum number of tokens that a state may lack."""
        return max_replayed(self.w, self.flush, self.grid)


def empty_state(dims: Dims, slots: int, dtype: torch.dtype, fill: float = 0.0) -> RecurrentState:
    """Return a state of `slots` slots filled with one value. dtype: of conv."""

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots, *shape), fill, dtype=dtype)

    length = history_length(dims.w, dims.max_replayed)
    return RecurrentState(
        recurrent=full(dims.hv, dims.k, dims.v, dtype=dims.state),
        conv=full(history_length(dims.w, dims.r), dims.channels, dtype=dtype),
        u=full(length, dims.hv, dims.v),
        k=full(length, dims.hk, dims.k),
        decay=full(length, dims.hv),
    )


def random_state(
    dims: Dims, slots: int, used: list[int], dtype: torch.dtype, seed: int
) -> RecurrentState:
    """Return a state with plausible numbers in the `used` slots and NaN in all others."""
    state = empty_state(dims, slots, dtype, fill=float("nan"))
    generator = torch.Generator().manual_seed(seed)
    for part in state.tensors():
        shape = (len(used), *part.shape[1:])
        part[used] = (torch.randn(shape, generator=generator) * 0.3).to(part.dtype)
    state.decay[used] = torch.exp(-state.decay[used].abs())
    return state


def poison(state: RecurrentState, slot: int, start: int, history: int, lacking: int) -> None:
    """Write NaN to every history entry that a window at `start` must not read."""
    for part in state.tensors()[1:]:
        live = history if part is state.conv else lacking
        indices = torch.arange(start, start + part.shape[1] - live) % part.shape[1]
        part[slot, indices] = float("nan")


def step_rows(dims: Dims, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Return state, slots, starts and folded of a step.

    States lack from no token to the maximum; windows and replays cross the grid; slots are out of
    order; histories wrap around; entries that nothing may read are NaN.
    """
    slots = [4, 1, 6, 3, 2]
    lacking = [0, 1, 2, dims.w, dims.w - 1]
    starts = [1, 2, 77, 1000, 64]
    if dims.grid > 1:
        lacking = [0, 1, dims.max_replayed, dims.w, dims.grid]
        starts = [14, 20, 66, 1007, 64]
    state = random_state(dims, 8, slots, dtype, seed)
    for slot, start, count in zip(slots, starts, lacking, strict=True):
        poison(state, slot, start, dims.r, count)
    first = torch.tensor(starts, dtype=torch.int32)
    folded = first - torch.tensor(lacking, dtype=torch.int32)
    return dict(state=state, slots=torch.tensor(slots), starts=first, folded=folded)


def chunk_rows() -> dict[str, Tensor]:
    """Return the rows of a prompt step, which resume from slots 2, 3, 4 and 9 of 12.

    Fresh and resumed rows, an empty row, a null row, rows shorter than the convolution, snapshots.
    """
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
"""Generator of a layer's inputs [*tokens, ...] from dims, tokens, dtype and seed."""
Weights = Callable[[Dims, torch.dtype, int], Any]
"""Generator of a layer's weights from dims, dtype and seed."""


def committed_inputs(
    inputs: Raw, dims: Dims, length: int, committed: Sequence[int], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Return inputs of windows of `length` tokens, with NaN in padding tokens, and `committed`."""
    raw = inputs(dims, (len(committed), length), dtype, seed)
    for x in raw.values():
        for row, count in enumerate(committed):
            x[row, count:] = float("nan")
    return dict(**raw, committed=torch.tensor(committed, dtype=torch.int32))


def step_cases(
    inputs: Raw, weights: Weights, dtype: torch.dtype, layers: Sequence[Dims]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of a recurrent-form op: see step_rows.

    The last cases are committed windows of the first two layers, longer than the histories.
    """
    for i, dims in enumerate(layers):
        for length in (1, dims.w):
            rows = step_rows(dims, dtype, i)
            raw = inputs(dims, (len(rows["slots"]), length), dtype, i)
            layer = weights(dims, dtype, i)
            yield f"{dims}, Q={length}", dict(**raw, weights=layer, **rows, committed=None)
    for i, dims in enumerate(layers[:2]):
        raw = committed_inputs(inputs, dims, COMMITTED[0], COMMITTED, dtype, i)
        arguments = dict(**raw, weights=weights(dims, dtype, i), **step_rows(dims, dtype, i))
        yield f"{dims}, Q={COMMITTED[0]} committed", arguments


def chunk_cases(
    inputs: Raw, weights: Weights, dtype: torch.dtype, layers: Sequence[Dims]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, arguments on the CPU) of a chunked-form op: see chunk_rows."""
    for i, dims in enumerate(layers):
        rows = chunk_rows()
        raw = inputs(dims, (int(rows["cu_seqlens"][-1]),), dtype, i)
        state = random_state(dims, 12, [2, 3, 4, 9], dtype, i)
        yield str(dims), dict(**raw, weights=weights(dims, dtype, i), state=state, **rows)
