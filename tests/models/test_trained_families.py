"""Trained models of other families: each calls tools and finds a needle, and none of its drafters
changes a bit of that, while what they draft is taken."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from lockstep import LLM
from tests.models.trained import (
    ASSETS,
    LENGTH,
    MOST_BYTES,
    Answers,
    answers_alone,
    answers_right_and_alike,
    cases,
    size_of,
)

FAMILIES = ("nemotron_h", "deepseek_v3", "qwen3", "qwen3_draft")
DRAFTERS: list[tuple[str, str, str | None, float]] = [
    ("nemotron_h", "mtp", None, 2.5),
    ("deepseek_v3", "mtp", None, 2.5),
    ("qwen3", "eagle3", "qwen3/eagle3", 2.5),
    ("qwen3", "draft_model", "qwen3_draft", 2.5),
]
"""Model, method, the drafter's folder, and the least acceptance length with 3 drafts a step."""


SAMPLES = cases(2)


@pytest.fixture(scope="module")
def alone_of() -> Callable[[str], Answers]:
    """What a model answers without drafts, asked once."""

    def ask(name: str) -> Answers:
        return answers_alone(LLM(str(ASSETS / name), max_num_seqs=1, **LENGTH), SAMPLES)

    return cache(ask)


@pytest.mark.parametrize(("name", "method", "drafter", "least"), DRAFTERS)
def test_it_answers_right_and_alike(
    alone_of: Callable[[str], Answers], name: str, method: str, drafter: str | None, least: float
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if drafter is not None:
        config["model"] = str(ASSETS / drafter)
    llm = LLM(str(ASSETS / name), speculative_config=config, max_num_seqs=8, **LENGTH)
    assert answers_right_and_alike(llm, alone_of(name), SAMPLES) >= least


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_small_enough_to_be_kept(name: str) -> None:
    assert size_of(ASSETS / name) <= MOST_BYTES
