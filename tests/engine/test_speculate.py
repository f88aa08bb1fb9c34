"""Requests without drafts, alone and mixed with others: the same tokens, and the source of each."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.scheduling.request import Request
from lockstep.worker.hooks import CheckHooks
from tests.bundled_model import DRAFTS, GREEDY, PROMPTS, SEEDED, make_engine

PARAMS = [replace(GREEDY, max_tokens=14), replace(SEEDED, max_tokens=14)] * 2
SCENARIOS: dict[str, tuple[CheckHooks, dict[str, Any]]] = {
    "usual": (CheckHooks(), {}),
    "preempted": (CheckHooks(preempt_every=3), {"num_gpu_blocks": 24}),
    "any number of drafts": (CheckHooks(draft_policy=RandomDraftLength), {"adaptive": True}),
}


def run(llm: LLM, wants: list[bool]) -> list[Request]:
    """Run the prompts in one batch; wants: which of the requests use drafts."""
    requests = []
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        requests += llm.processor.requests(str(index), prompt, params)
    for request, speculate in zip(requests, wants, strict=True):
        request.speculate = speculate
    llm.engine.run(requests, lambda request: None)
    return requests


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the model's answers without drafts."""
    return [request.output_token_ids for request in run(make_engine(None), [True] * 4)]


@pytest.mark.default_cases("usual-mtp", "preempted-ngram")
@pytest.mark.parametrize(
    ("scenario", "drafter"),
    [*((scenario, "mtp") for scenario in SCENARIOS), ("preempted", "ngram")],
)
def test_speculate_changes_no_token(expected: list[list[int]], drafter: str, scenario: str) -> None:
    hooks, settings = SCENARIOS[scenario]
    wants = [True, False, True, False]
    actual = run(make_engine(drafter, hooks, **settings), wants)
    assert [request.output_token_ids for request in actual] == expected
    for request, speculate in zip(actual, wants, strict=True):
        sources = request.token_sources
        assert len(sources) == len(request.output_token_ids)
        assert sources[0] == "plain", "a prompt's last chunk verifies no draft"
        if speculate:
            past_the_end = request.metrics.num_accepted_tokens - sources.count("draft")
            assert 0 <= past_the_end <= DRAFTS
        else:
            assert set(sources) == {"plain"}
            assert request.metrics.num_draft_tokens == 0
    assert sum(request.metrics.num_draft_tokens for request in actual) > 0


def test_token_sources_delimit_steps(expected: list[list[int]]) -> None:
    actual = run(make_engine("mtp"), [True] * 4)
    for request in actual:
        steps = "".join(
            {"draft": "d", "bonus": "b", "plain": "p"}[s] for s in request.token_sources
        )
        ends = steps.replace("b", "b ").replace("p", "p ").split()
        assert all(len(end) <= DRAFTS + 1 for end in ends)
        assert len(ends) in (request.metrics.num_steps, request.metrics.num_steps + 1)


def test_steps_without_speculating_requests_have_no_drafts() -> None:
    llm = make_engine("mtp", adaptive=True)
    policy = llm.engine.scheduler.draft_policy
    counts: list[int] = []
    observe = policy.observe

    def watched(rows: int, count: int, result: int, accepted: list[int], ms: float) -> None:
        counts.append(count)
        observe(rows, count, result, accepted, ms)

    policy.observe = watched  # type: ignore[method-assign]
    run(llm, [False] * 4)
    assert len(counts) >= 13
    assert set(counts) == {0}
