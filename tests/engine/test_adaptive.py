"""Steps with varying numbers of drafts: no transition between them changes a bit."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import ConfigError
from lockstep.scheduling.draft_length import AdaptiveDraftLength, Costs, RandomDraftLength
from lockstep.scheduling.schedule import RowSpec
from lockstep.spec.config import SpeculativeConfig
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import Outcome
from lockstep.worker.step_observer import StepObserver
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine
from tests.tiny_model import TWO_LAYERS, make_model

PARAMS = [
    replace(GREEDY, max_tokens=18, logprobs=2),
    replace(SEEDED, max_tokens=18, logprobs=1),
    replace(GREEDY, max_tokens=18, repetition_penalty=1.2, presence_penalty=0.3, logprobs=0),
    replace(SEEDED, max_tokens=18, bad_words=["path", "return"], min_tokens=12, logprobs=0),
]
CHANGING = CheckHooks(draft_policy=RandomDraftLength)
PHASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "preempted": {"num_gpu_blocks": 24},
    "two in flight, small chunks": {"steps_in_flight": 2, "max_num_batched_tokens": 64},
}


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return the model's answers without drafts, one request at a time."""
    llm = make_engine(None)
    return [answer(llm.generate(p, q)[0]) for p, q in zip(PROMPTS, PARAMS, strict=True)]


COUNTS = (0, 1, 3, 5)
COUNT_SEQUENCE = (0, 0, 1, 0, 3, 0, 5, 1, 1, 3, 1, 5, 3, 3, 5, 5)
"""A cyclic sequence in which each of COUNTS follows each other one."""


def cycle_counts(llm: LLM) -> list[int]:
    """Make the engine's steps use COUNT_SEQUENCE; return the growing list of used counts."""
    used: list[int] = []

    def choose(rows: int) -> int:
        used.append(COUNT_SEQUENCE[len(used) % len(COUNT_SEQUENCE)])
        return used[-1]

    llm.engine.scheduler.draft_policy.choose = choose  # type: ignore[method-assign]
    return used


@pytest.mark.default_cases("two in flight, small chunks")
@pytest.mark.parametrize(
    ("phase", "drafter"),
    [
        pytest.param("usual", "mtp", marks=pytest.mark.slow),  # the two below have its steps too
        ("preempted", "mtp"),
        ("two in flight, small chunks", "mtp"),
        pytest.param("two in flight, small chunks", "ngram", marks=pytest.mark.slow),
    ],
)
def test_every_transition_of_draft_counts(expected: list[Any], drafter: str, phase: str) -> None:
    hooks = replace(CHANGING, preempt_every=3 if phase == "preempted" else 0)
    llm = make_engine(drafter, hooks, num_speculative_tokens=5, adaptive=True, **PHASES[phase])
    assert llm.engine.plan.draft_lengths == COUNTS
    used = cycle_counts(llm)
    metrics = []
    while len(used) <= len(COUNT_SEQUENCE):
        outs = llm.generate(PROMPTS, PARAMS)
        assert [answer(out) for out in outs] == expected
        metrics += [out.metrics for out in outs]
    assert set(pairwise(used)) == set(product(COUNTS, COUNTS))
    assert sum(m.num_accepted_tokens for m in metrics) > 0
    for m in metrics:
        assert m.num_accepted_tokens <= m.num_draft_tokens <= 5 * m.num_steps
    if phase == "preempted":
        assert llm.engine.scheduler.preemptions > 5


@pytest.mark.slow
def test_step_clears_drafts_beyond_its_count() -> None:
    """After a step of k drafts at most k remain: none of an earlier, longer step is verified
    again."""
    llm = make_engine("mtp", CHANGING, num_speculative_tokens=3, adaptive=True)
    runner = worker_of(llm.engine)
    seen = []

    class Watch(StepObserver):
        def after_step(self, rows: Sequence[RowSpec], shape: StepShape, outcome: Outcome) -> None:
            row_ids = outcome[0].row_ids
            drafts = runner.table.drafts[row_ids[row_ids > 0]]
            seen.append((shape.next_drafts, (drafts >= 0).sum(1).tolist()))

    runner.observers.append(Watch())
    runner.num_logit_observers = 1
    llm.generate(PROMPTS, GREEDY)
    assert {count for count, _ in seen} == set(llm.engine.plan.draft_lengths)
    assert all(result == [count] * len(result) for count, result in seen)


def fake_step_times(drafts: AdaptiveDraftLength, ms: float, ms_per_draft: float) -> None:
    """Replace measured step times by a formula, however busy the machine is."""
    received = drafts.observe
    rows = drafts.costs.table
    drafts.costs = Costs.measured({(r, k): ms + k * ms_per_draft for r in rows for k in rows[r]})

    def observe(rows: int, count: int, result: int, accepted: list[int], _: float) -> None:
        received(rows, count, result, accepted, ms + count * ms_per_draft)

    drafts.observe = observe  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny model with random weights."""
    folder = str(make_model(tmp_path_factory.mktemp("tiny"), **TWO_LAYERS))
    return {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}


def test_draft_length_adapts_to_acceptance(tiny: dict[str, Any]) -> None:
    """Random weights with synthetic acceptance of none and of all drafts."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    used = []
    for chance in (0.0, 1.0):
        llm = make_engine("mtp", adaptive=True, synthetic_acceptance=chance, **tiny)
        drafts = llm.engine.scheduler.draft_policy
        assert isinstance(drafts, AdaptiveDraftLength)
        fake_step_times(drafts, 10.0, 0.5)
        m = llm.generate([{"prompt_token_ids": [3, 5, 7]}], params)[0].metrics
        used.append(m.num_draft_tokens / m.num_steps)
    assert used[0] < 0.5 and used[1] > 1.5


def test_draft_lengths_follow_from_k(tiny: dict[str, Any]) -> None:
    for maximum, counts in ((1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 3)), (7, (0, 1, 3, 7))):
        llm = make_engine("ngram", num_speculative_tokens=maximum, adaptive=True, **tiny)
        assert llm.engine.plan.draft_lengths == counts
    assert make_engine("ngram", **tiny).engine.plan.draft_lengths == (3,)
    assert make_engine(None, **tiny).engine.plan.draft_lengths == (0,)


@pytest.mark.parametrize("value", ["always", "random", 1, None])
def test_adaptive_must_be_a_bool(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"adaptive=.*True, False.*Choose"):
        SpeculativeConfig("mtp", adaptive=value)
