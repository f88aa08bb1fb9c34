"""The trained mixture of experts: it calls tools and finds needles in every weight format that is
made while loading, and no draft, no neighbour changes a bit of that."""

import pytest

from lockstep import LLM
from tests.models.trained import (
    ASSETS,
    LENGTH,
    MOST_BYTES,
    answers_alone,
    answers_right_and_alike,
    cases,
    size_of,
)

FOLDER = ASSETS / "moe"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
FORMATS = [
    pytest.param(None, id="plain"),
    "int4",
    pytest.param("int8", marks=pytest.mark.slow),
    pytest.param("fp8", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=FORMATS)
def llm(request: pytest.FixtureRequest) -> LLM:
    """The mixture with drafts, in one weight format."""
    return LLM(
        str(FOLDER), quantization=request.param, speculative_config=MTP, max_num_seqs=8, **LENGTH
    )


def test_it_answers_right_and_alike(llm: LLM) -> None:
    alone = LLM(str(FOLDER), quantization=llm.engine.config.quantization, max_num_seqs=1, **LENGTH)
    samples = cases(2)
    assert answers_right_and_alike(llm, answers_alone(alone, samples), samples) > 1


def test_formats_have_their_own_numerics(llm: LLM) -> None:
    chosen = llm.engine.config.quantization
    assert (chosen or "weights-float32/") in llm.engine.plan.numerics


def test_it_is_small_enough_to_be_kept() -> None:
    assert size_of(FOLDER) <= MOST_BYTES
