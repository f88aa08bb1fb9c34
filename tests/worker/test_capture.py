"""Capture checks: the blamed op, memory outside the graph's pool, and restored hooks."""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import LLM, SamplingParams
from lockstep.kernels import Backend
from lockstep.kernels.activations import silu_mul
from lockstep.layers.attention import Attention
from lockstep.layers.gated_delta_net import GatedDeltaNet
from lockstep.layers.mlp import GatedMLP
from lockstep.step import StepContext, StepShape
from lockstep.worker import capture
from lockstep.worker.capture_checks import (
    Fault,
    OwnMemory,
    describe_fault,
    no_compiling,
    segments_of,
)
from lockstep.worker.executor import worker_of
from lockstep.worker.program import Forwarded, RunStep
from tests.tiny_model import make_model


class Inner(nn.Module):
    """Module that calls the given function."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Outer(nn.Module):
    """Nested modules with names."""

    def __init__(self, call):
        super().__init__()
        self.blocks = nn.ModuleList([Inner(torch.neg), Inner(call)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def helper(x: Tensor) -> Tensor:
    raise Fault("does what it must not")


def faulty_silu_mul(gate_up: Tensor) -> Tensor:
    return helper(gate_up)


def fault_of(call, *arguments) -> str:
    with pytest.raises(Exception) as caught:
        call(*arguments)
    return describe_fault(caught.value)


def test_fault_names_op_layer_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(faulty_silu_mul, lambda **traits: None)
    monkeypatch.setitem(silu_mul.backends, "faulty", backend)
    actual = fault_of(Outer(silu_mul.backends[silu_mul.choose()].run), torch.ones(2, 4))
    assert actual.startswith("op silu_mul of blocks.1 (")
    assert "test_capture.py:" in actual and 'in helper: raise Fault("does what' in actual


def test_fault_in_package_has_relative_path() -> None:
    actual = fault_of(Outer(silu_mul), torch.ones(2, 5))
    assert actual.startswith("op silu_mul of blocks.1 (kernels/activations/contract.py:")


def test_fault_outside_ops_names_function() -> None:
    """A line of this project that only calls torch is named, not torch's own line."""

    def shape(x: Tensor) -> Tensor:
        return x.view(7)

    actual = fault_of(Outer(shape), torch.ones(4))
    assert actual.startswith("test_fault_outside_ops_names_function.<locals>.shape of blocks")
    assert "return x.view(7)" in actual
    assert fault_of(helper, torch.ones(4)).startswith("helper (")


def test_host_allocation_in_step_is_a_fault() -> None:
    x = torch.ones(4)
    with OwnMemory((0, 1), stream=None):
        x.add_(1).view(2, 2).t()
        x.sum()
        torch.empty(0)
        for result in (lambda: x + 1, lambda: torch.empty(3), lambda: x.cumsum(0)):
            with pytest.raises(Fault, match=r"takes \d+ bytes on cpu outside of the graph's pool"):
                result()


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_pool_id_refcount_survives_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 releases a reference to each number of the id that it never acquired."""

    def snapshot(pool: tuple[int, int]) -> list[dict[str, int]]:
        for number in pool:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return [{"address": 64}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    pool = (0, int("70000"))
    before = sys.getrefcount(pool[1])
    assert segments_of(pool) == [{"address": 64}]
    after = sys.getrefcount(pool[1])
    assert after == before


def test_no_compiling_refuses_and_restores_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    requested = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: requested.append(what))
    with no_compiling(), pytest.raises(Fault, match="compiles the kernel attend"):
        knobs.runtime.jit_cache_hook(key="", fn=SimpleNamespace(name="attend"))
    knobs.runtime.jit_cache_hook(key="")
    assert requested == [{"key": ""}]


def test_piecewise_graphs_exclude_mixers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are a layer's sublayers without their mixers; the output does not change."""
    inside: list[str] = []
    called: list[tuple[str, int]] = []

    def recorded_piece(fn: Any, pool: Any, wanted_value: Any, name: str) -> Any:
        def piece(x: Tensor, delta: Tensor | None, index: int, ctx: StepContext) -> Any:
            called.append((name, index))
            inside.append(name)
            try:
                return fn(x, delta, index, ctx)
            finally:
                inside.pop()

        return piece

    def watch_forward(kind: type[nn.Module], within: bool) -> None:
        forward = kind.forward

        def run(self: nn.Module, *arguments: Any) -> Any:
            assert bool(inside) == within, kind.__name__
            return forward(self, *arguments)

        monkeypatch.setattr(kind, "forward", run)

    folder = make_model(tmp_path / "model")
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 128}
    llm = LLM(str(folder), speculative_config=None, **settings)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(9))}
    expected = llm.generate(prompt, params)[0].outputs[0].token_ids
    monkeypatch.setattr(capture, "CapturedFunction", recorded_piece)
    capture.capture_pieces(worker_of(llm.engine).model, None, [1])
    for mixer in (Attention, GatedDeltaNet):
        watch_forward(mixer, False)
    watch_forward(GatedMLP, True)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
    step = [(f"blocks.{layer}.tokenwise", half) for layer in range(4) for half in range(2)]
    assert called == step * 3


def test_forward_and_decide_have_graphs_for_uniform_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """decide is keyed by forward's output, which a graph always leaves at the same address."""
    recorded_piece: dict[str, set[Any]] = {"forward": set(), "decide": set()}
    kept: dict[Any, Any] = {}

    def captured(fn: Any, pool: Any, expected: Any, name: str, starts_early: Any) -> Any:
        def face(*key: Any) -> Any:
            if not expected(key):
                return fn(*key)
            recorded_piece[name].add(key)
            return kept.setdefault((name, key), fn(*key))

        return face

    def forward(*shapes: StepShape) -> tuple[Forwarded, ...]:
        steps: list[Any] = [SimpleNamespace(shape=shape) for shape in shapes]
        zeros = torch.zeros(1)
        return tuple(Forwarded(step, zeros, (), zeros, shapes) for step in steps)

    order: list[str] = []
    monkeypatch.setattr(capture, "CapturedFunction", captured)
    halves = RunStep(forward, lambda forwarded: order.append("decide"))  # type: ignore[arg-type, return-value]
    run_step = capture.capture_program(halves, None)
    shapes = (StepShape.uniform(1, 2), StepShape.uniform(3, 1), StepShape(1, 5, 5, True))
    for shape in shapes:
        for _ in range(2):
            run_step(shape, lambda: order.append("between"))
    assert recorded_piece["forward"] == {(shape,) for shape in shapes[:2]}
    assert sorted(str(key) for key in recorded_piece["decide"]) == sorted(
        str(key) for key in recorded_piece["forward"]
    )
    assert order[:2] == ["between", "decide"]
    # A pass of two steps has a graph if both have one, and a decide for each of them.
    for prompt in (shapes[1], shapes[2]):
        order.clear()
        between = [lambda: order.append("first"), lambda: order.append("second")]
        for _ in run_step.run([shapes[0], prompt], between):
            pass
        assert order == ["first", "decide", "second", "decide"]
    assert len(recorded_piece["forward"]) == 3
    assert len(recorded_piece["decide"]) == 4
