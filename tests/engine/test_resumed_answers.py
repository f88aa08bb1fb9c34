"""Answers of the bundled model while steps raise: everything that users get is as without."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep import SamplingParams
from lockstep.worker.executor import worker_of
from tests.bundled_model import PROMPTS, SEEDED, answer, assert_idle, make_engine

EVERY = 7
"""Number of launches of which one raises."""
LENGTH = 24
PARAMS: list[SamplingParams] = [
    replace(SEEDED, max_tokens=LENGTH, n=2, logprobs=2, prompt_logprobs=1),
    replace(SEEDED, max_tokens=LENGTH, stop=["(", "):"], include_stop_str_in_output=True),
    replace(
        SEEDED,
        max_tokens=LENGTH,
        ignore_eos=False,
        structured_outputs={"regex": "([a-d][0-9]-){6}"},
    ),
    replace(SEEDED, max_tokens=LENGTH, presence_penalty=1.5, frequency_penalty=0.5, min_tokens=9),
]


def test_answers_do_not_change_while_steps_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions, log-probabilities of answers and prompts, stop strings, grammars, penalties."""
    llm = make_engine("mtp", max_num_batched_tokens=64)
    params = [one.clone() for one in PARAMS]
    expected = list(map(answer, llm.generate(PROMPTS, params)))
    worker = worker_of(llm.engine)
    launch = worker.launch
    count = 0

    def fail(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count % EVERY == 0:
            raise RuntimeError("a step failed")
        return launch(*arguments)

    monkeypatch.setattr(worker, "launch", fail)
    assert list(map(answer, llm.generate(PROMPTS, params))) == expected
    assert llm.engine.drain_stats().resumed_total > 2 * len(PROMPTS)
    assert_idle(llm)
