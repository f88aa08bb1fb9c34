"""Trained models of other families call tools and find a needle; drafters change no bit and their
drafts are accepted."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lockstep import LLM
from tests.models.trained import (
    ASSETS,
    LENGTH,
    MAX_BYTES,
    Answers,
    answers_alone,
    cases,
    check_answers,
    size_of,
)

FAMILIES = ("nemotron_h", "deepseek_v3", "qwen3", "qwen3_draft")
DRAFTERS: list[tuple[str, str, str | None, float]] = [
    ("nemotron_h", "mtp", None, 2.5),
    ("deepseek_v3", "mtp", None, 2.5),
    ("qwen3", "eagle3", "qwen3/eagle3", 2.5),
    ("qwen3", "draft_model", "qwen3_draft", 2.5),
]
"""(model, method, the drafter's folder, minimum acceptance length with 3 drafts per step)."""


SAMPLES = cases(2)


@pytest.fixture(scope="module")
def answers_without_drafts() -> Callable[[str], Answers]:
    """Return a cached function: model -> its answers without drafts."""

    def ask(name: str) -> Answers:
        return answers_alone(LLM(str(ASSETS / name), max_num_seqs=1, **LENGTH), SAMPLES)

    return cache(ask)


@pytest.mark.default_cases("qwen3_draft")
@pytest.mark.parametrize(("name", "method", "drafter", "minimum"), DRAFTERS)
def test_answers_are_correct_and_drafts_change_no_bit(
    answers_without_drafts: Callable[[str], Answers],
    name: str,
    method: str,
    drafter: str | None,
    minimum: float,
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if drafter is not None:
        config["model"] = str(ASSETS / drafter)
    llm = LLM(str(ASSETS / name), speculative_config=config, max_num_seqs=8, **LENGTH)
    assert check_answers(llm, answers_without_drafts(name), SAMPLES) >= minimum


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_model_size_is_limited(name: str) -> None:
    assert size_of(ASSETS / name) <= MAX_BYTES
