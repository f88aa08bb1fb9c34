"""Requests that want no drafts, alone and among others: the same tokens, and how each came."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.scheduling.request import Request
from lockstep.worker.hooks import CheckHooks
from tests.bundled_model import DRAFTS, GREEDY, PROMPTS, SEEDED, make_engine

PARAMS = [replace(GREEDY, max_tokens=14), replace(SEEDED, max_tokens=14)] * 2
WORLDS: dict[str, tuple[CheckHooks, dict[str, Any]]] = {
    "usual": (CheckHooks(), {}),
    "preempted": (CheckHooks(preempt_every=3), {"num_gpu_blocks": 24}),
    "any number of drafts": (CheckHooks(draft_policy=RandomDraftLength), {"adaptive": True}),
}


def run(llm: LLM, wants: list[bool]) -> list[Request]:
    """The prompts at once; wants: which of the requests want drafts."""
    requests = []
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        requests += llm.processor.requests(str(index), prompt, params)
    for request, speculate in zip(requests, wants, strict=True):
        request.speculate = speculate
    llm.engine.run(requests, lambda request: None)
    return requests


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What the model says without drafts."""
    return [request.output_token_ids for request in run(make_engine(None), [True] * 4)]


@pytest.mark.parametrize(
    ("world", "drafter"),
    [*((world, "mtp") for world in WORLDS), ("preempted", "ngram")],
)
def test_no_token_depends_on_it(plain: list[list[int]], drafter: str, world: str) -> None:
    hooks, settings = WORLDS[world]
    wants = [True, False, True, False]
    found = run(make_engine(drafter, hooks, **settings), wants)
    assert [request.output_token_ids for request in found] == plain
    for request, speculate in zip(found, wants, strict=True):
        sources = request.token_sources
        assert len(sources) == len(request.output_token_ids)
        assert sources[0] == "plain", "a prompt's last chunk verifies no draft"
        if speculate:
            past_the_end = request.metrics.num_accepted_tokens - sources.count("draft")
            assert 0 <= past_the_end <= DRAFTS
        else:
            assert set(sources) == {"plain"}
            assert request.metrics.num_draft_tokens == 0
    assert sum(request.metrics.num_draft_tokens for request in found) > 0


def test_sources_tell_steps_apart(plain: list[list[int]]) -> None:
    found = run(make_engine("mtp"), [True] * 4)
    for request in found:
        steps = "".join(
            {"draft": "d", "bonus": "b", "plain": "p"}[s] for s in request.token_sources
        )
        ends = steps.replace("b", "b ").replace("p", "p ").split()
        assert all(len(end) <= DRAFTS + 1 for end in ends)
        assert len(ends) in (request.metrics.num_steps, request.metrics.num_steps + 1)


def test_steps_of_nobody_who_wants_drafts_bring_none() -> None:
    llm = make_engine("mtp", adaptive=True)
    policy = llm.engine.scheduler.draft_policy
    counts: list[int] = []
    observe = policy.observe

    def watched(rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        counts.append(count)
        observe(rows, count, made, accepted, ms)

    policy.observe = watched  # type: ignore[method-assign]
    run(llm, [False] * 4)
    assert len(counts) >= 13
    assert set(counts) == {0}
