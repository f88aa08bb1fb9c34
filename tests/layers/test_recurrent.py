"""Recurrent mixers run a step of forced tokens with the bits of one token at a time."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

from lockstep.layers.build_context import BuildContext
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.mamba2 import Mamba2
from lockstep.step import StepContext, StepShape

HIDDEN = 32
COMMITTED = (20, 7)
"""Committed tokens of each row of a step of 20 tokens per row."""


def delta(build: BuildContext) -> GatedDeltaNet:
    return GatedDeltaNet(build, HIDDEN, 1, 2, 16, 16, kernel=4, eps=1e-6)


def mamba(build: BuildContext) -> Mamba2:
    return Mamba2(build, HIDDEN, 2, 16, 1, 16, kernel=4, eps=1e-6)


def context(
    shape: StepShape, slots: list[int], starts: list[int], folded: list[int], **rest: Tensor
) -> StepContext:
    """Return the context of a step, with the fields that a recurrent mixer reads."""
    unread = {f.name: None for f in fields(StepContext)}
    read = dict(
        shape=shape,
        state_slots=torch.tensor(slots),
        starts=torch.tensor(starts, dtype=torch.int32),
        folded=torch.tensor(folded, dtype=torch.int32),
        flush=1,
    )
    return StepContext(**{**unread, **read, **rest})  # type: ignore[arg-type]


@pytest.mark.parametrize("mixer_of", [delta, mamba])
def test_forced_step_equals_single_tokens(mixer_of: Callable[[BuildContext], nn.Module]) -> None:
    torch.manual_seed(0)
    mixer = mixer_of(BuildContext("cpu", torch.float32, 1, 64))
    for parameter in mixer.parameters():
        parameter.data.normal_(std=0.3)
    rows, length = (len(COMMITTED), max(COMMITTED))
    x = torch.randn(rows, length, HIDDEN)
    mixer.bind(empty_storage(mixer))
    expected = torch.zeros(rows, length, HIDDEN)
    for row, count in enumerate(COMMITTED):
        for t in range(count):
            step = context(StepShape.uniform(1, 1), [row + 1], [t], [max(t - 1, 0)])
            expected[row, t] = mixer(x[row, t : t + 1], step)
    mixer.bind(empty_storage(mixer))
    shape = StepShape(rows, rows * length, length, forced=True)
    committed = torch.tensor(COMMITTED, dtype=torch.int32)
    step = context(shape, [1, 2], [0, 0], [0, 0], committed=committed)
    out = mixer(x.flatten(0, 1), step).view_as(expected)
    assert torch.equal(out, expected)


def empty_storage(mixer: nn.Module) -> dict[str, Tensor]:
    """Return zeros for a mixer's state: two rows and the null slot."""
    storage: dict[str, Tensor] = mixer.cache_spec().allocate(3, 64, "cpu")
    return {name: torch.zeros_like(part) for name, part in storage.items()}
