"""Choice of joint steps: on a GPU as bounded graphs, or eagerly where long prompts bind it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.config import PADDED_PROMPTS, StepLimits
from lockstep.step import JointContext, StepContext, StepShape
from lockstep.worker import joint_steps
from lockstep.worker.executor import worker_of
from lockstep.worker.joint_steps import JointSteps, joint_buckets, max_graphs
from lockstep.worker.program import RunStep, do_nothing
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, assert_idle

DECODE = StepShape.uniform(2, 1)


@pytest.fixture
def limits(plain: LLM) -> StepLimits:
    """Return limits of a GPU whose steps of few prompts run as graphs."""
    plan = plain.engine.plan
    graphs = {"prompt_buckets": (64, 256), "joint_graphs": 6}
    return replace(plan, device="cuda", graph_mode="full", **graphs)


@pytest.fixture
def steps(plain: LLM, limits: StepLimits) -> JointSteps:
    """Return the choice of an engine with these limits."""
    return JointSteps(limits, worker_of(plain.engine).model)


def test_prompts_are_padded_to_multiples_of_128(limits: StepLimits) -> None:
    assert joint_buckets(limits) == (64, 128, 256)
    assert joint_buckets(replace(limits, prompt_buckets=())) == ()
    assert joint_buckets(replace(limits, joint_graphs=0)) == (), "the plan has no memory for them"


def test_steps_join_as_a_graph_or_with_long_prompts(steps: JointSteps) -> None:
    steps.min_eager_tokens = 300
    padded = steps.prompt_shape(DECODE, [70, 30])
    assert padded is not None and padded.padded and padded.tokens == 128
    # More prompts than a padded step has, or more tokens: only long ones join, without padding.
    assert steps.prompt_shape(DECODE, [20] * (PADDED_PROMPTS + 1)) is None
    eager = steps.prompt_shape(DECODE, [50] * (PADDED_PROMPTS + 1))
    assert eager is not None and (eager.padded, eager.tokens, eager.rows) == (False, 400, 8)
    assert not steps.needs_capture((DECODE, eager))
    assert steps.prompt_shape(DECODE, [299]) is None


def test_graphs_of_joint_steps_are_bounded(
    steps: JointSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.min_eager_tokens = 1 << 20
    monkeypatch.setattr(joint_steps, "max_graphs", lambda limits: 2)
    for lengths in ([10], [100]):
        shape = steps.prompt_shape(DECODE, lengths)
        assert shape is not None and steps.needs_capture((DECODE, shape))
        steps.graphs.add((DECODE, shape))
        assert not steps.needs_capture((DECODE, shape))
    assert steps.prompt_shape(DECODE, [200]) is None, "two graphs at most"
    assert steps.prompt_shape(DECODE, [20]) is not None, "captured ones stay"
    monkeypatch.undo()
    assert max_graphs(steps.limits) > 9
    assert steps.prompt_shape(DECODE, [200]) is not None
    steps.limits = replace(steps.limits, joint_graphs=1)
    assert steps.prompt_shape(DECODE, [200]) is None, "results of one largest step at most"
    steps.graphs.clear()
    assert steps.prompt_shape(DECODE, [200]) is not None
    steps.may_capture = False
    assert steps.prompt_shape(DECODE, [200]) is None, "a capture failed"


def test_without_whole_graphs_only_long_prompts_join(plain: LLM, limits: StepLimits) -> None:
    model = worker_of(plain.engine).model
    for mode in ("none", "piecewise"):
        steps = JointSteps(replace(limits, graph_mode=mode), model)
        assert steps.min_eager_tokens > 1000
        assert steps.prompt_shape(DECODE, [60]) is None
        assert steps.prompt_shape(DECODE, [steps.min_eager_tokens]) is not None


def joined_as_graphs(worker: Worker, limits: StepLimits) -> JointSteps:
    """Let a worker on a CPU choose joint steps as for graphs."""
    steps = JointSteps(limits, worker.model)
    steps.min_eager_tokens = 1 << 20
    worker.joint_steps = steps
    worker.run_step = RunStep(*worker.uncaptured)
    return steps


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
