"""Prompts through a recurrence's chunked form: one row's prompt, split anywhere on the grid."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import cases as gated_delta_cases
from lockstep.kernels.gated_delta_rule import gated_delta_chunk
from lockstep.kernels.mamba2 import cases as mamba2_cases
from lockstep.kernels.mamba2 import mamba2_chunk
from lockstep.kernels.recurrent.cases import Dims, Raw, empty_state
from lockstep.kernels.recurrent.history import past_indices
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.registry import Op
from tests.kernels.backends import Backend, same_bits


@dataclass(frozen=True)
class ChunkedForm:
    """Op that runs prompts. inputs, weights: functions of its cases; seed: of the weights."""

    op: Op
    inputs: Raw
    weights: Callable[[Dims, torch.dtype, int], Any]
    seed: int

    def run_chunks(
        self,
        backend: Backend,
        dims: Dims,
        data: dict[str, Tensor],
        cuts: list[int],
        mate: int = 0,
    ) -> tuple[Tensor, RecurrentState]:
        """Run one row's prompt in chunks between the cuts, with a batch mate of `mate` tokens."""
        state = backend.place(empty_state(dims, 6, backend.dtype, fill=float("nan")))
        layer = backend.place(self.weights(dims, backend.dtype, self.seed))
        other = self.inputs(dims, (mate,), backend.dtype, 11)
        outs = []

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        for begin, end in zip(cuts, cuts[1:], strict=False):
            joint = {n: torch.cat([other[n], data[n][begin:end]]) for n in other}
            indices = dict(
                cu_seqlens=ints(0, mate, mate + end - begin),
                starts=ints(0, begin),
                state_src=ints(1, 2),
                state_slots=ints(1, 2),
                snapshot_slots=ints(0, 3),
            )
            arguments = dict(**backend.place(joint), weights=layer, state=state, **indices)
            outs.append(backend.run(self.op, arguments)[mate:])
        return torch.cat(outs), state

    def assert_independent_of_cuts(self, backend: Backend, dims: Dims) -> None:
        """Assert that the cuts of 300 tokens change no bit of outputs, states and raw inputs."""
        data = self.inputs(dims, (300,), backend.dtype, 9)
        full, state = self.run_chunks(backend, dims, data, [0, 300])
        for mate, cuts in ((0, [0, 64, 300]), (70, [0, 300]), (5, [0, 128, 192, 256, 300])):
            part, other = self.run_chunks(backend, dims, data, cuts, mate)
            assert same_bits(part, full), cuts
            for slot, position in ((2, 300), (3, 256)):
                assert same_bits(other.recurrent[slot], state.recurrent[slot])
                last = past_indices(position, dims.r, state.conv.shape[1])
                assert same_bits(other.conv[slot][last], state.conv[slot][last])


GATED_DELTA = ChunkedForm(
    gated_delta_chunk, gated_delta_cases.chunk_inputs, gated_delta_cases.weights, seed=13
)
MAMBA2 = ChunkedForm(mamba2_chunk, mamba2_cases.inputs, mamba2_cases.weights, seed=12)
