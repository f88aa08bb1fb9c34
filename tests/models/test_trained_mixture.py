"""The trained mixture of experts calls tools and finds needles in every weight format that is
quantized while loading; drafts and batch mates change no bit."""

import pytest

from lockstep import LLM
from tests.models.trained import (
    ASSETS,
    LENGTH,
    MAX_BYTES,
    answers_alone,
    cases,
    check_answers,
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
    """Return the mixture with drafts, in one weight format."""
    return LLM(
        str(FOLDER), quantization=request.param, speculative_config=MTP, max_num_seqs=8, **LENGTH
    )


@pytest.mark.default_cases("plain")
def test_answers_are_correct_and_drafts_change_no_bit(llm: LLM) -> None:
    alone = LLM(str(FOLDER), quantization=llm.engine.config.quantization, max_num_seqs=1, **LENGTH)
    samples = cases(2)
    assert check_answers(llm, answers_alone(alone, samples), samples) > 1


def test_formats_have_their_own_numerics(llm: LLM) -> None:
    chosen = llm.engine.config.quantization
    assert (chosen or "weights-float32/") in llm.engine.plan.numerics


def test_trained_model_size_is_limited() -> None:
    assert size_of(FOLDER) <= MAX_BYTES
