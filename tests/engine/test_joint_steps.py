"""Joint steps: a decode step and a prompt step of one forward pass have the bits of two passes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.answer import Answer
from lockstep.check.engines import CheckEngine, Completion
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.random_adapters import write_random_adapter
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.scheduling.schedule import Results
from lockstep.step import StepShape
from lockstep.worker import executor
from lockstep.worker.executor import executor_of, worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rank_times import StepTimes, end_step_times, start_step_times
from lockstep.worker.worker import LaunchedStep, PlannedStep, Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, make_engine
from tests.thread_ranks import ThreadRanks

ASSETS = Path(__file__).parents[1] / "assets"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
EAGLE3 = {**MTP, "method": "eagle3", "model": str(ASSETS / "qwen3" / "eagle3")}
LONG = "The clock on the square had stopped, and nobody in the town could say when. " * 6
"""A prompt of several chunks."""
STRUCTURED = StructuredOutputsParams(regex=r"[a-z ]{6,40}\.")
PARAMS = [
    replace(GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=1),
    replace(SEEDED, max_tokens=9, logprobs=1, presence_penalty=0.5),
    replace(GREEDY, max_tokens=13, ignore_eos=False, structured_outputs=STRUCTURED),
    replace(
        SEEDED,
        max_tokens=6,
        seed=3,
        ignore_eos=False,
        structured_outputs=STRUCTURED,
        prompt_logprobs=0,
    ),
]
"""Sampling parameters of the requests, whose answers end at different steps."""
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "Gated DeltaNet": (None, {}),
    "Gated DeltaNet, MTP": (None, {"speculative_config": MTP}),
    "Mamba-2 and experts": ("nemotron_h", {}),
    "Mamba-2 and experts, MTP": ("nemotron_h", {"speculative_config": MTP}),
    "latent attention": ("deepseek_v3", {}),
    "latent attention, MTP": ("deepseek_v3", {"speculative_config": MTP}),
    "attention": ("qwen3", {}),
    "attention, EAGLE-3": ("qwen3", {"speculative_config": EAGLE3}),
    "FP8 activations": (None, {"quantization": "fp8", "activation_dtype": "fp8"}),
    "host memory": (None, {"num_gpu_blocks": 20, "kv_offloading_size": 0.01}),
    "padded prompts": ("nemotron_h", {"speculative_config": MTP, "prompt_buckets": [16, 64]}),
}
"""Name -> checkpoint, engine settings."""


@pytest.fixture(scope="module")
def adapters(plain: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of two adapters of the bundled model."""
    folder = tmp_path_factory.mktemp("adapters")
    model = worker_of(plain.engine).model
    return {
        name: str(write_random_adapter(model, folder / name, seed=seed))
        for seed, name in enumerate(("first", "second"), 1)
    }


def build(model: str | None, **settings: Any) -> LLM:
    """Return an engine whose prompts are computed in chunks while other rows decode."""
    folder = {} if model is None else {"model": str(ASSETS / model)}
    limits = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    return LLM(**{**folder, **limits, **settings})


def never_join(decode: StepShape, lengths: Sequence[int]) -> None:
    """Run a decode step and a prompt step apart."""


def join_never(worker: Worker) -> None:
    """Let a rank run all steps apart."""
    worker.joint_steps.join = never_join  # type: ignore[method-assign]


def join(worker: Worker) -> None:
    """Undo join_never()."""
    vars(worker.joint_steps).pop("join", None)


def run(
    llm: LLM, rule: Callable[[Worker], None], adapters: tuple[str, ...] = ("",)
) -> tuple[list[Answer], list[int]]:
    """Serve requests together. Return their answers with digests of all logits, and the number of
    steps of each forward pass.

    rule: join or join_never, which every rank calls.
    """
    engine = CheckEngine(llm)
    executor_of(llm.engine).collective_rpc(rule)
    worker = worker_of(llm.engine)
    passes: list[int] = []
    launch = worker._launch

    def counted(steps: Any, *arguments: Any) -> Any:
        passes.append(len(steps))
        return launch(steps, *arguments)

    completions: list[Completion] = []
    for index, prompt in enumerate([*PROMPTS, LONG] * 2):
        ids = llm.processor.prompt_ids(prompt)[:200]
        (completion,) = engine.completions(f"r{index}", ids, PARAMS[index % len(PARAMS)])
        completion.request.adapter = adapters[index % len(adapters)]
        completions.append(completion)
    digests = LogitDigests()
    worker._launch = counted  # type: ignore[method-assign]
    try:
        with engine.observed(digests):
            engine.serve(completions)
    finally:
        del worker._launch
    by_request = digests.by_request()
    answers = [completion.answer(by_request[completion.request.id]) for completion in completions]
    return [replace(answer, metrics=RequestMetrics()) for answer in answers], passes


def assert_same_bits(llm: LLM, adapters: tuple[str, ...] = ("",)) -> None:
    """Assert that answers are equal with joint steps and without, and that steps join."""
    apart, single = run(llm, join_never, adapters)
    joint, passes = run(llm, join, adapters)
    assert max(single) == 1 and passes.count(2) > 5
    assert joint == apart


@pytest.mark.default_cases(*(name for name in CASES if "," in name or name.islower()))
@pytest.mark.parametrize("name", CASES)
def test_joint_steps_change_no_bit(name: str) -> None:
    model, settings = CASES[name]
    assert_same_bits(build(model, **settings))


def test_joint_steps_of_adapters_change_no_bit(adapters: dict[str, str]) -> None:
    llm = build(None, lora_modules=adapters, enable_prefix_caching=False)
    assert_same_bits(llm, ("first", "", "second"))


@pytest.mark.parametrize("model", [None, pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_joint_steps_of_two_ranks_change_no_bit(
    model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    assert_same_bits(build(model, tensor_parallel_size=2, speculative_config=MTP, audit=0.001))


def test_draft_length_learns_no_time_from_joint_steps(llm: LLM) -> None:
    """A joint step takes the time of its prompts, too."""
    worker = worker_of(llm.engine)
    reported: list[tuple[bool, bool]] = []
    collect = worker.collect

    def watched(launched: list[LaunchedStep]) -> Results:
        results = collect(launched)
        shapes = [step.shape for step in launched]
        alone = any(shape.is_decode for shape in shapes) and not any(s.prompt for s in shapes)
        reported.append((alone, results.decode_ms is not None))
        return results

    worker.collect = watched  # type: ignore[method-assign]
    try:
        params = [replace(GREEDY, max_tokens=3 + 2 * index) for index in range(8)]
        llm.generate(PROMPTS * 2, params)
    finally:
        del worker.collect
    assert all(alone == has_time for alone, has_time in reported)
    assert {(True, True), (False, False)} == set(reported)


def test_times_of_ranks_leave_joint_steps_out(llm: LLM) -> None:
    worker = worker_of(llm.engine)
    passes: list[tuple[bool, ...]] = []
    launch = worker._launch

    def counted(steps: list[PlannedStep], *arguments: Any) -> Any:
        passes.append(tuple(step.shape.is_decode for step in steps))
        return launch(steps, *arguments)

    worker._launch = counted  # type: ignore[method-assign]
    start_step_times(worker)
    try:
        llm.generate(PROMPTS * 2, [replace(GREEDY, max_tokens=3 + 2 * i) for i in range(8)])
        times = worker.observers[-1]
    finally:
        del worker._launch
        (mean_ms,) = end_step_times(worker)
    assert isinstance(times, StepTimes) and mean_ms > 0
    assert passes.count((True, False)) > 0
    assert len(times.timers) == passes.count((True,)) > 0


def test_preempted_rows_join_with_the_same_bits() -> None:
    hooks = CheckHooks(preempt_every=3)
    settings = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    assert_same_bits(make_engine("ngram", hooks, steps_in_flight=2, **settings))
