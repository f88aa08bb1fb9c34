"""Traces of requests: in joint steps, and where a step raises before its model call."""

from dataclasses import replace

import pytest

from lockstep import LLM
from lockstep.check.engines import CheckEngine, build, build_plain
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.judges.trace import Digests, Trace, compare, traced
from lockstep.check.scenarios.runner import ScenarioRunner
from lockstep.check.scenarios.scenario import BEFORE_STEP, Kind, Limits, Scenario, ScenarioRequest
from lockstep.step import ForwardContext
from tests.bundled_model import GREEDY, PROMPTS

NUM_REQUESTS = 8


def trace(llm: LLM, indices: range, traced_index: int) -> Digests:
    """Serve requests together, and return the digests of one of them."""
    engine = CheckEngine(llm)
    completions = []
    for index in indices:
        ids = llm.processor.prompt_ids(PROMPTS[index % len(PROMPTS)])
        params = replace(GREEDY, max_tokens=3 + 2 * index)
        completions += engine.completions(f"r{index}", ids, params)
    with traced(engine, lambda row: row.id == f"r{traced_index}") as digests:
        engine.serve(completions)
    return digests


@pytest.mark.parametrize("index", [2, 6])
def test_digests_of_joint_steps_are_those_of_a_request_alone(
    llm: LLM, plain: LLM, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions_of_joint_steps: set[int] = set()
    begin = Trace.begin

    def watched(self: Trace, ctx: ForwardContext) -> None:
        begin(self, ctx)
        if len(ctx.steps) > 1:
            positions_of_joint_steps.update(position for _, position in self._positions)

    alone = trace(plain, range(index, index + 1), index)
    monkeypatch.setattr(Trace, "begin", watched)
    together = trace(llm, range(NUM_REQUESTS), index)
    end = max(alone) + 1
    assert len(positions_of_joint_steps & set(alone)) > 1
    assert compare(alone, together, end) is None
    for position in positions_of_joint_steps & set(alone):
        # Modules within a mixer get the tokens of one step, so they are not recorded.
        for name in ("embed", "blocks.0.linear_attn", "blocks.3.mlp", "norm"):
            assert name in together[position], (position, sorted(together[position]))


def test_step_that_raises_changes_no_trace(model: str) -> None:
    """Its rows were recorded. The probe after it runs null rows in fewer rows."""
    settings = {"load_format": "dummy"}
    plain = PlainRuns(build_plain(model, settings))
    params = {"max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
    requests = tuple(
        ScenarioRequest(tuple(range(first, first + 20)), params) for first in (3, 30, 60)
    )
    limits = Limits(failure=BEFORE_STEP, failure_step=4)
    scenario = Scenario(Kind(), limits, requests)
    kind = scenario.kind
    runner = ScenarioRunner(build(model, {**settings, **kind.settings()}, kind.hooks()), kind)
    for index, request in enumerate(requests):
        with traced(plain.engine, lambda row: row.id.startswith("plain-")) as alone:
            plain.without_outputs().answers(request.prompt, scenario.plain_params(request))
        with traced(runner.engine, lambda row, name=f"r{index}": row.id == name) as digests:
            result = runner.play(scenario, plain)
        assert result.fault is None and result.violation is None
        assert compare(alone, digests, len(request.prompt) + 8) is None
