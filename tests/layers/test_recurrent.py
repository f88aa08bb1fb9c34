"""Recurrent mixers run a step of forced tokens with the bits of one token at a time."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from lockstep.kernels.linear import tree_sum
from lockstep.layers.build_context import BuildContext
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.linear import Gemm
from lockstep.layers.mamba2 import Mamba2
from lockstep.quantization import WeightSink
from lockstep.step import JointContext, StepContext, StepShape
from tests.layers.rounding import Rounding

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


def gated(monkeypatch: pytest.MonkeyPatch) -> GatedDeltaNet:
    """Return a mixer whose wide projections are quantized, so that b and a have their own GEMM."""
    monkeypatch.setattr("lockstep.layers.linear.MAX_DEQUANTIZED", 0)
    torch.manual_seed(0)
    build = BuildContext("cpu", torch.bfloat16, 1, 64, weight_format=Rounding(of="qkvz"))
    mixer = GatedDeltaNet(build, HIDDEN, 1, 2, 16, 16, kernel=4, eps=1e-6, grouped=True)
    for target in mixer.weights().values():
        sink = WeightSink.of(target)
        sink.fill(torch.randn(sink.shape).mul(0.3).to(sink.dtypes[0]))
    for gemm in mixer.in_proj.gemms:
        cast(Gemm, gemm).finish()
    return mixer


def test_mixer_adds_partials_of_its_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over a step of generated tokens and a prompt's: partials change no bit."""
    mixer = gated(monkeypatch)
    generated = 4
    prompt = 70
    decode = context(StepShape.uniform(2, 2), [1, 2], [3, 5], [2, 5])
    rows = dict(state_src=0, state_slots=3, snapshot_slots=0, starts=0)
    more = {name: torch.tensor([value], dtype=torch.int32) for name, value in rows.items()}
    bounds = torch.tensor([0, prompt], dtype=torch.int32)
    shape = StepShape(1, prompt, prompt, prompt=True)
    chunk = replace(context(shape, [3], [0], [0], cu_seqlens=bounds), **more)
    ctx = JointContext(parts=(decode, chunk), token_ids=torch.zeros(0))
    x = torch.randn(generated + prompt, HIDDEN).bfloat16()
    partials = torch.randn(8, generated + prompt, 4)
    gates = cast(Gemm, mixer.in_proj.gemms[1])
    assert gates.allow_partials
    outputs = []
    for product in (partials, tree_sum(partials).bfloat16()):
        gates.linear = lambda *arguments, product=product: product
        mixer.bind(empty_storage(mixer, 4))
        outputs.append([mixer(x, ctx), *mixer.cache_tensors()])
    assert outputs[0][0].isfinite().all() and outputs[0][0].any()
    for actual, expected in zip(*outputs, strict=True):
        assert torch.equal(actual, expected)


def empty_storage(mixer: nn.Module, slots: int = 3) -> dict[str, Tensor]:
    """Return zeros for a mixer's state: some slots, of which the first is null."""
    storage: dict[str, Tensor] = mixer.cache_spec().allocate(slots, 64, "cpu")
    return {name: torch.zeros_like(part) for name, part in storage.items()}
