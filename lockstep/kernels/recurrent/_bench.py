"""What the benchmarks of every recurrence share: states, and what a step moves of them."""

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv
from lockstep.kernels.recurrent.cases import Dims, empty_state
from lockstep.kernels.recurrent.state import RecurrentState


def bench_state(dims: Dims, rows: int, env: BenchEnv) -> tuple[RecurrentState, list[Tensor]]:
    """A state of `rows` slots and the null one, and its parts as they were."""
    state = empty_state(dims, rows + 1, env.dtype)
    for name, part in vars(state).items():
        values = env.random(*part.shape, dtype=part.dtype).mul_(0.3)
        setattr(state, name, torch.exp(-values.abs()) if name == "decay" else values)
    return state, [part.clone() for part in state.tensors()]


def row_bytes(state: RecurrentState, query_len: int) -> int:
    """What a step reads of a row's state, and as much again it writes: as the floor counts it."""
    lines = [part[0, :query_len] for name, part in vars(state).items() if name != "recurrent"]
    return sum(part.numel() * part.itemsize for part in (state.recurrent[0], *lines))


def restore(state: RecurrentState, kept: list[Tensor]) -> None:
    """The state as it was."""
    for part, value in zip(state.tensors(), kept, strict=True):
        part.copy_(value)
