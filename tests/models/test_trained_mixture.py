"""The trained mixture of experts: it calls tools and finds needles in every weight format that is
made while loading, and no draft, no neighbour changes a bit of that."""

from pathlib import Path

import pytest

from lockstep import LLM, SamplingParams
from lockstep.outputs import RequestOutput
from training import tasks

FOLDER = Path(__file__).parents[1] / "assets" / "moe"
MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=96, skip_special_tokens=False, logprobs=1)
FORMATS = [
    pytest.param(None, id="plain"),
    "int4",
    pytest.param("int8", marks=pytest.mark.slow),
    pytest.param("fp8", marks=pytest.mark.slow),
]
NEEDLE = {"characters": 2300}
"""A document of 1 K tokens."""
END = "<|im_end|>"
FIRST = 10**9
"""Evaluation's seeds begin here."""


@pytest.fixture(scope="module", params=FORMATS)
def llm(request: pytest.FixtureRequest) -> LLM:
    """The mixture with drafts, in one weight format."""
    return LLM(str(FOLDER), quantization=request.param, speculative_config=MTP, max_num_seqs=8)


def cases(count: int) -> list[tasks.Sample]:
    """Tool calls, and one needle."""
    found = [tasks.draw(FIRST + seed, True, "tools") for seed in range(count)]
    return [*found, tasks.draw(FIRST, True, "needle", **NEEDLE)]


def bits(output: RequestOutput) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities."""
    found = output.outputs[0]
    assert found.logprobs is not None
    pairs = zip(found.token_ids, found.logprobs, strict=True)
    return [(token, entries[token].logprob) for token, entries in pairs]


def test_it_answers_right_and_alike(llm: LLM) -> None:
    samples = cases(2)
    prompts = [sample.prompt for sample in samples]
    together = llm.generate(prompts, GREEDY)
    wanted = [sample.answer for sample in samples]
    right = [
        out.outputs[0].text.removesuffix(END) == answer.removesuffix(END)
        for out, answer in zip(together, wanted, strict=True)
    ]
    assert sum(right) >= len(samples) - 1
    assert sum(out.metrics.num_accepted_tokens for out in together) > 0
    alone = LLM(str(FOLDER), quantization=llm.engine.config.quantization, max_num_seqs=1)
    for prompt, out in zip(prompts, together, strict=True):
        assert bits(alone.generate([prompt], GREEDY)[0]) == bits(out)


def test_formats_have_their_own_numerics(llm: LLM) -> None:
    chosen = llm.engine.config.quantization
    assert (chosen or "weights-float32/") in llm.engine.plan.numerics


def test_it_is_small_enough_to_be_kept() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 10 << 20
