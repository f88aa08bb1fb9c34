"""CPU threads of a step: one for small steps, and no bit depends on their number."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.layers.linear import Weight
from lockstep.step import StepShape
from lockstep.worker import cpu_threads
from lockstep.worker.executor import worker_of
from lockstep.worker.program import RunStep, do_nothing
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine
from tests.tiny_model import make_model

LONG = list(range(5, 305))


class Blocks(nn.Module):
    """Model with layers of these parameter counts and a large embedding."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(9999))
        self.blocks = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)


@pytest.fixture(autouse=True)
def three_threads() -> Any:
    """Set three threads, as a program may, on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_layer_flops_counts_layer_parameters() -> None:
    assert cpu_threads.layer_flops(Blocks(100, 300)) == 400


def test_layer_flops_counts_prepacked_weights() -> None:
    """The linear layers of a loaded model have no plain weight any more."""
    model = worker_of(make_engine(None).engine).model
    weights = [module for module in model.blocks.modules() if isinstance(module, Weight)]
    prepacked = [module for module in weights if module.prepacked is not None]
    assert prepacked and all(module.weight is None for module in prepacked)
    elements = sum(rows * columns for rows, columns in (module.shape for module in prepacked))
    assert cpu_threads.layer_flops(model) >= 2 * elements // len(model.blocks)


@pytest.mark.parametrize(
    ("token_flops", "tokens", "expected"),
    [
        (1_500_000, 1, True),
        (1_500_000, 4096, True),
        (25_000_000, 8, True),
        (25_000_000, 20, False),
        (25_000_000, 4096, False),
        (7_812_499, 64, True),
        (7_812_500, 63, True),
        (7_812_500, 64, False),
    ],
)
def test_small_steps_prefer_one_thread(token_flops: int, tokens: int, expected: bool) -> None:
    assert cpu_threads.prefers_one_thread(token_flops, tokens) == expected


def test_step_threads_depend_on_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "ONE_THREAD_FLOPS", 1000)
    seen = []

    def forward(*shapes: StepShape) -> Any:
        seen.append(torch.get_num_threads())
        return [SimpleNamespace(step=SimpleNamespace(shape=shape)) for shape in shapes]

    def decide(forwarded: Any) -> Any:
        seen.append(torch.get_num_threads())
        if forwarded.step.shape.prompt:
            raise RuntimeError("a step that fails")

    run = cpu_threads.with_step_threads(RunStep(forward, decide), Blocks(100, 300))
    run(StepShape.uniform(2, 1))
    run(StepShape.uniform(3, 1))
    assert seen == [1, 1, 3, 3]
    with pytest.raises(RuntimeError, match="fails"):
        run(StepShape(1, 2, 2, prompt=True))
    assert seen == [1, 1, 3, 3, 1, 1]
    seen.clear()
    uniform = StepShape.uniform(2, 1)
    assert len(list(run.run([uniform, uniform], [do_nothing] * 2))) == 2
    assert seen == [3, 1, 1]
    assert torch.get_num_threads() == 3


def test_every_engine_step_chooses_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In warm-up, prompts and decoding; between steps the program's number is restored."""
    llm = make_engine("mtp")
    short = replace(GREEDY, max_tokens=4)
    program = worker_of(llm.engine).program
    seen = []
    verify = program.sampler.sample_target

    def watched(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return verify(*arguments)

    monkeypatch.setattr(program.sampler, "sample_target", watched)
    llm.generate(PROMPTS, short)
    assert set(seen) == {1} and torch.get_num_threads() == 3
    monkeypatch.setattr(cpu_threads, "ONE_THREAD_FLOPS", 0)
    seen.clear()
    llm.generate(PROMPTS, short)
    assert set(seen) == {3}


@pytest.mark.default_cases("None")
@pytest.mark.parametrize(("drafter", "uneven"), [("mtp", False), (None, True)])
def test_thread_count_changes_no_answer(
    drafter: str | None, uneven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare answers and log-probabilities, of prompts too, of an engine per number of threads.

    uneven: products whose 40 columns are not divided evenly.
    """
    settings: dict[str, Any] = {}
    if uneven:
        folder = make_model(tmp_path / "model", intermediate_size=20)
        settings = {"model": str(folder), "load_format": "dummy"}

    def answers(threshold: float) -> list[Any]:
        monkeypatch.setattr(cpu_threads, "ONE_THREAD_FLOPS", threshold)
        llm = make_engine(drafter, **settings)
        prompts = [*PROMPTS, {"prompt_token_ids": LONG}]
        received = []
        for params in (GREEDY, SEEDED):
            expected = replace(params, max_tokens=8, logprobs=3, prompt_logprobs=2)
            received += [answer(out) for out in llm.generate(prompts, expected)]
        return received

    one = answers(float("inf"))
    many = answers(0)
    assert one == many and len(one) == 10
