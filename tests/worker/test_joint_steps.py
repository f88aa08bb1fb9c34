"""Choice of joint steps: on a GPU as graphs, whose number and memory are bounded."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.check.scenarios.inventory import tensors_of
from lockstep.config import PADDED_PROMPTS, StepLimits
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.step import JointContext, StepContext, StepShape
from lockstep.worker import joint_steps
from lockstep.worker.executor import worker_of
from lockstep.worker.joint_steps import JointSteps
from lockstep.worker.program import RunStep, do_nothing
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, assert_idle, make_engine

DECODE = StepShape.uniform(2, 1)


@pytest.fixture
def limits(plain: LLM) -> StepLimits:
    """Return limits of a GPU whose steps of few prompts run as graphs."""
    plan = plain.engine.plan
    settings = {"device": "cuda", "graph_mode": "full", "prompt_buckets": (64, 256)}
    settings["joint_graphs"] = 6
    return replace(plan, **settings, row_buckets=(1, 2, 4), max_num_seqs=4)


@pytest.fixture
def at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let joint steps be captured when they are first needed."""
    monkeypatch.setattr(joint_steps, "USES_BEFORE_CAPTURE", 0)


@pytest.mark.usefixtures("at_first_use")
def test_tokens_of_joint_graphs_are_multiples_of_a_tile(limits: StepLimits) -> None:
    steps = JointSteps(limits)
    for lengths, tokens in (([70, 30], 128), ([126], 128), ([127], 256), ([20] * 7, 256)):
        pair = steps.join(DECODE, lengths)
        assert pair is not None and pair[1].padded
        assert sum(shape.tokens for shape in pair) == tokens
    assert steps.join(DECODE, [255]) is None, "more than the largest prompt graph"
    assert steps.join(DECODE, [20] * (PADDED_PROMPTS + 1)) is None


@pytest.mark.usefixtures("at_first_use")
@pytest.mark.parametrize(
    ("buckets", "rows"),
    [
        ((1, 2, 3, 4, 6, 8, 12), {1: 1, 2: 3, 3: 3, 4: 6, 6: 6, 8: 12, 12: 12}),
        ((5, 6), {5: 6, 6: 6}),
        ((9,), {9: 9}),
    ],
)
def test_decode_steps_are_padded_to_few_row_counts(
    limits: StepLimits, buckets: tuple[int, ...], rows: dict[int, int]
) -> None:
    steps = JointSteps(replace(limits, row_buckets=buckets))
    for bucket, expected in rows.items():
        pair = steps.join(StepShape.uniform(bucket, 3), [100])
        assert pair is not None and pair[0] == StepShape.uniform(expected, 3)


def test_steps_run_apart_until_their_shapes_are_used_often(limits: StepLimits) -> None:
    steps = JointSteps(limits)
    for _ in range(joint_steps.USES_BEFORE_CAPTURE):
        assert steps.join(DECODE, [100]) is None
    pair = steps.join(DECODE, [100])
    assert pair is not None and steps.needs_capture(pair)
    assert steps.join(DECODE, [200]) is None, "another one"


@pytest.mark.usefixtures("at_first_use")
def test_graphs_of_joint_steps_are_bounded(
    limits: StepLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = JointSteps(limits)
    monkeypatch.setattr(joint_steps, "max_graphs", lambda limits: 1)
    pair = steps.join(DECODE, [10])
    assert pair is not None and steps.needs_capture(pair)
    steps.graphs.add(pair)
    assert not steps.needs_capture(pair)
    assert steps.join(DECODE, [200]) is None, "one graph at most"
    assert steps.join(DECODE, [20]) is not None, "captured ones stay"
    monkeypatch.setattr(joint_steps, "max_graphs", lambda limits: 9)
    assert steps.join(DECODE, [200]) is not None
    # Graphs keep rows of logits: of 1 or 2 decoding rows, of 4 prompts and of the null row. Two
    # graphs have 13, and 20 with a third one. The memory of two largest ones holds 18.
    steps.limits = replace(limits, joint_graphs=2)
    second = steps.join(StepShape.uniform(1, 1), [100])
    assert second is not None
    steps.graphs.add(second)
    assert steps.join(DECODE, [200]) is None
    steps.graphs.remove(second)
    assert steps.join(DECODE, [200]) is not None
    steps.limits = replace(limits, joint_graphs=1)
    assert steps.join(DECODE, [200]) is None, "results of one largest step at most"
    steps.graphs.clear()
    assert steps.join(DECODE, [200]) is not None
    steps.may_capture = False
    assert steps.join(DECODE, [200]) is None, "a capture failed"


@pytest.mark.usefixtures("at_first_use")
@pytest.mark.parametrize(
    "changed",
    [
        {"graph_mode": "none"},
        {"graph_mode": "piecewise"},
        {"prompt_buckets": ()},
        {"joint_graphs": 0},
    ],
    ids=str,
)
def test_without_graphs_of_prompts_no_steps_join(limits: StepLimits, changed: Any) -> None:
    steps = JointSteps(replace(limits, **changed))
    assert steps.join(DECODE, [60]) is None


def joined_as_graphs(worker: Worker, limits: StepLimits) -> JointSteps:
    """Let a worker on a CPU choose joint steps as for graphs."""
    steps = JointSteps(limits)
    worker.joint_steps = steps
    worker.run_step = RunStep(*worker.uncaptured)
    return steps


@pytest.mark.usefixtures("at_first_use")
def test_capture_of_joint_steps_changes_no_answer(
    llm: LLM, plain: LLM, limits: StepLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Null rows are run before a joint step of real rows, which a capture would run twice."""
    worker = worker_of(llm.engine)
    for name in ("joint_steps", "run_step"):
        monkeypatch.setattr(worker, name, getattr(worker, name))
    steps = joined_as_graphs(worker, replace(limits, query_len=llm.engine.plan.query_len))
    params = [
        replace(GREEDY if index % 2 else SEEDED, max_tokens=3 + 2 * index, logprobs=1)
        for index in range(8)
    ]
    prompts = PROMPTS * 2
    outputs = llm.generate(prompts, params)
    assert steps.graphs and all(prompt.padded for _, prompt in steps.graphs)
    for output, prompt, one in zip(outputs, prompts, params, strict=True):
        assert answer(output) == answer(plain.generate(prompt, one)[0])


def live_bytes(worker: Worker) -> list[bytes]:
    """Return the bytes of all tensors of a worker, without null rows, null units and inputs."""
    plan = worker.plan
    inputs = {i.storage.untyped_storage().data_ptr() for i in worker.table.pass_inputs}
    sizes = (plan.max_num_seqs + 1, plan.num_pages, plan.num_slots)
    values = []
    for tensor in tensors_of(worker):
        if tensor.dim() and tensor.untyped_storage().data_ptr() not in inputs:
            live = tensor[1:] if len(tensor) in sizes else tensor
            values.append(live.contiguous().view(torch.uint8).numpy().tobytes())
    return values


@pytest.mark.usefixtures("at_first_use")
@pytest.mark.parametrize("drafter", ["mtp", "suffix"])
def test_capture_writes_null_rows_only(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, pages, slots, masks and the tables of the drafter keep their values."""
    llm = make_engine(drafter, steps_in_flight=2)
    worker = worker_of(llm.engine)
    limits = replace(llm.engine.plan, device="cuda", graph_mode="full", prompt_buckets=(64, 256))
    limits = replace(limits, joint_graphs=6)
    joined_as_graphs(worker, limits)
    capture = worker._capture_joint
    num_running: list[int] = []

    def watched(shapes: tuple[StepShape, ...]) -> None:
        before = live_bytes(worker)
        capture(shapes)
        assert live_bytes(worker) == before
        num_running.append(len(llm.engine.scheduler.running))

    monkeypatch.setattr(worker, "_capture_joint", watched)
    pattern = StructuredOutputsParams(regex=r"[a-z ]{6,40}\.")
    params = [
        replace(GREEDY if index % 2 else SEEDED, max_tokens=4 + 3 * index, presence_penalty=0.5)
        for index in range(8)
    ]
    params[2] = replace(params[2], ignore_eos=False, structured_outputs=pattern)
    llm.generate(PROMPTS * 2, params)
    assert num_running and min(num_running) > 1


@pytest.mark.usefixtures("at_first_use")
def test_failed_capture_ends_captures_and_no_request(
    llm: LLM, limits: StepLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(llm.engine)
    params = [replace(GREEDY, max_tokens=3 + 2 * index) for index in range(8)]
    expected = [answer(output) for output in llm.generate(PROMPTS * 2, params)]
    for name in ("joint_steps", "run_step"):
        monkeypatch.setattr(worker, name, getattr(worker, name))
    steps = joined_as_graphs(worker, replace(limits, query_len=llm.engine.plan.query_len))
    run = type(worker.run_step).run

    def failing(self: Any, shapes: Any, before_decide: Any) -> Any:
        if len(shapes) > 1 and all(before is do_nothing for before in before_decide):
            raise RuntimeError("no memory for another graph")
        return run(self, shapes, before_decide)

    monkeypatch.setattr(type(worker.run_step), "run", failing)
    outputs = llm.generate(PROMPTS * 2, params)
    assert [answer(output) for output in outputs] == expected
    assert not steps.may_capture and not steps.graphs
    assert_idle(llm)


def test_inputs_of_single_tokens_join(plain: LLM) -> None:
    """Optional inputs of steps are concatenated; indices of embeddings count all tokens."""
    worker = worker_of(plain.engine)
    with torch.inference_mode():
        worker.table.inputs.fill()
        first, second = (worker.table.prepare(StepShape.uniform(rows, 1)) for rows in (2, 3))
    embeds = torch.ones(1, 4)
    parts: list[StepContext] = [
        replace(first, rope_positions=torch.zeros(3, 2)),
        replace(
            second,
            rope_positions=torch.ones(3, 3),
            input_embeds=embeds,
            embed_index=torch.tensor([1]),
        ),
    ]
    ctx = JointContext.of(parts)
    assert ctx.token_ids.shape == (5,) and ctx.adapter_ids is None
    assert ctx.rope_positions is not None and ctx.rope_positions.shape == (3, 5)
    assert ctx.embed_index is not None and ctx.embed_index.tolist() == [3]
    assert ctx.input_embeds is not None and torch.equal(ctx.input_embeds, embeds)
    changed = ctx.with_token_inputs((torch.arange(5), None, None, None))
    assert changed.steps == ctx.steps and changed.adapter_ids is not None
