"""Prompt steps padded to a token count give the answers of steps without padding, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.config import PADDED_PROMPTS
from lockstep.scheduling.schedule import RowSpec
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.program import Outcome
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.step_shapes import prompt_step
from lockstep.worker.step_timer import StepTimer
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine

ASSETS = Path(__file__).parents[1] / "assets"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
EAGLE3 = {**MTP, "method": "eagle3", "model": str(ASSETS / "qwen3" / "eagle3")}
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "bundled, MTP": (None, {"speculative_config": MTP}),
    "bundled, suffix, TurboQuant": (
        None,
        {
            "speculative_config": {**MTP, "method": "suffix"},
            "kv_cache_dtype": "turboquant_4bit_nc",
        },
    ),
    "moe, int4": ("moe", {"speculative_config": MTP, "quantization": "int4"}),
    "nemotron_h, FP8 weights and cache": (
        "nemotron_h",
        {"speculative_config": MTP, "quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "deepseek_v3": ("deepseek_v3", {"speculative_config": MTP}),
    "qwen3, EAGLE-3": ("qwen3", {"speculative_config": EAGLE3}),
}
"""Name -> checkpoint, engine settings."""
BUCKETS = (8, 24, 96)
PARAMS = [
    replace(GREEDY, max_tokens=6, logprobs=2, prompt_logprobs=1),
    replace(SEEDED, max_tokens=6, logprobs=2, presence_penalty=0.5),
]
LONG = "def read(path):\n    return open(path).read()\n" * 6
"""Prompt of several chunks, of which the last is padded."""


class PromptShapes(StepObserver):
    """Observer that keeps the shapes of prompt steps."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
        if shape.prompt:
            self.shapes.append(shape)


def generate(
    model: str | None, settings: dict[str, Any], **more: Any
) -> tuple[list[Any], list[StepShape]]:
    """Return the answers to a group of prompts and to a long one, and the prompt steps' shapes."""
    folder = {} if model is None else {"model": str(ASSETS / model)}
    sizes = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    llm = LLM(**folder, **sizes, **settings, **more)
    observer = PromptShapes()
    worker_of(llm.engine).observers.append(observer)
    answers = []
    for prompts in (PROMPTS[:2], [LONG]):
        outputs = llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)
        answers += [answer(output) for output in outputs]
    return answers, observer.shapes


@pytest.mark.default_cases("bundled, MTP", "moe, int4")
@pytest.mark.parametrize("name", CASES)
def test_padding_changes_no_answer(name: str) -> None:
    model, settings = CASES[name]
    expected, shapes = generate(model, settings)
    assert not any(shape.padded for shape in shapes)
    answers, shapes = generate(model, settings, prompt_buckets=BUCKETS)
    assert answers == expected
    assert {shape.tokens for shape in shapes if shape.padded} & set(BUCKETS)


def test_padding_to_the_maximum_length_changes_no_answer() -> None:
    settings = dict(max_model_len=128, max_num_seqs=1)
    prompt = {"prompt_token_ids": list(range(1000, 1120))}
    expected = make_engine(None, **settings).generate(prompt, PARAMS[0])
    padded = make_engine(None, **settings, prompt_buckets=(128, 256))
    assert padded.engine.plan.prompt_buckets == (128,), "positions of 256 tokens have no table"
    assert answer(padded.generate(prompt, PARAMS[0])[0]) == answer(expected[0])


def test_steps_of_many_prompts_or_tokens_are_not_padded() -> None:
    limits = replace(make_engine(None).engine.plan, max_num_seqs=64)
    padded = prompt_step(limits, [5, 4], BUCKETS)
    assert (padded.tokens, padded.query_len, padded.rows) == (24, 24, PADDED_PROMPTS + 1)
    assert padded.is_captured and padded.prompt
    for lengths in ([97], [1] * (PADDED_PROMPTS + 1)):
        shape = prompt_step(limits, lengths, BUCKETS)
        assert not shape.is_captured
        assert (shape.tokens, shape.rows) == (sum(lengths), len(lengths))


def test_engines_pad_prompts_only_where_graphs_are_used() -> None:
    assert make_engine(None).engine.plan.prompt_buckets == ()
    plan = make_engine(None, prompt_buckets=(4096, 64, 64), max_num_batched_tokens=512).engine.plan
    assert plan.prompt_buckets == (64,), "ascending, none above max_num_batched_tokens"


@pytest.mark.parametrize(("device_ms", "captured"), [((1.9, 2.1, 1.9), 1), ((1.0, 1.5, 1.9), 3)])
def test_prompts_are_captured_up_to_the_first_that_takes_longer_than_its_launches(
    device_ms: tuple[float, ...], captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(make_engine(None, prompt_buckets=BUCKETS).engine)
    host_seconds = iter((0.0, 9.0, 9.0, 9.002))  # the first run compiles, the second takes 2 ms
    device_times = iter(device_ms)

    class FakeTimer(StepTimer):
        def wait(self) -> None:
            self.began = 0.0
            self.ended = next(device_times) / 1000

    monkeypatch.setattr("lockstep.worker.worker.perf_counter", lambda: next(host_seconds))
    monkeypatch.setattr("lockstep.worker.worker.StepTimer", FakeTimer)
    with torch.inference_mode():
        assert worker._capture_prompts() == BUCKETS[:captured]
