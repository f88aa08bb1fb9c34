"""F3 (vLLM #40880, #40914), as reported by users: needles in prompts of 1 K to 32 K tokens, over
every KV format, with drafts, and on a GPU with every graph mode.

The bundled model was trained for 16,384 tokens. Prompts of 32 K use linear rope scaling by two:
without it the model found 2 of 6 needles with an unquantized cache.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.worker.build import find_model
from tests.regressions.test_f3_rates import DRAFTS, POINTS
from training.corpus import stdlib_text
from training.evaluate import Set, samples

RUNGS = {1: 2_300, 4: 9_500, 8: 19_000, 14: 33_000, 32: 75_000}
"""Thousands of tokens -> characters."""
SHORT = (1, 4, 8, 14)
NEEDLES = 2
"""Per prompt length."""
ROWS = 2
POSITIONS = 40_960
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, skip_special_tokens=False, logprobs=1)
KINDS = pytest.mark.parametrize("kind", POINTS)


class Answer(NamedTuple):
    """An answer's text and the log-probabilities of its tokens."""

    text: str
    logprobs: tuple[float, ...]


Found = dict[int, list[Answer]]


@pytest.fixture(scope="module", autouse=True)
def filler() -> None:
    """Return the text around the needles."""
    stdlib_text.load_filler()


def drafters_and_graph_modes() -> Iterator[dict[str, Any]]:
    """Return drafters and, on a GPU, the graph modes."""
    for drafter in DRAFTS.values():
        yield {"speculative_config": drafter}
    if torch.cuda.is_available():
        for mode in ("piecewise", "none"):
            yield {"speculative_config": DRAFTS["mtp"], "cuda_graph_mode": mode}


def cases(rung: int) -> list[Any]:
    """Return the prompts of a length with their answers."""
    part = Set(f"needle at {rung} K", "needle", NEEDLES, characters=RUNGS[rung])
    return samples(part, NEEDLES)


def scaled_rope() -> dict[str, Any]:
    """Return settings for the bundled model to read prompts of the longest length."""
    config = json.loads((Path(find_model(None)) / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_type": "linear", "factor": 2.0}
    return {"max_position_embeddings": POSITIONS, "rope_parameters": rope}


def answer_of(output: Any) -> Answer:
    """Return the answer to a request."""
    (result,) = output.outputs
    steps = zip(result.token_ids, result.logprobs, strict=True)
    return Answer(
        result.text.removesuffix("<|im_end|>"),
        tuple(step[token].logprob for token, step in steps),
    )


def answers_by_length(kind: str, rungs: tuple[int, ...], **way: Any) -> Found:
    """Return the bundled model's answers by prompt length."""
    llm = LLM(
        kv_cache_dtype=kind,
        hf_overrides=scaled_rope() if max(rungs) > max(SHORT) else {},
        max_num_seqs=ROWS,
        num_gpu_blocks=ROWS * POSITIONS // 64 + 1,
        num_snapshots=0,
        **way,
    )
    result: Found = {}
    for rung in rungs:
        outs = llm.generate([case.prompt for case in cases(rung)], GREEDY)
        assert all(len(out.prompt_token_ids) > 900 * rung for out in outs)
        result[rung] = [answer_of(out) for out in outs]
    return result


def found_needles(result: Found) -> list[bool]:
    """Return whether each needle was found."""
    return [
        answer.text == case.answer.removesuffix("<|im_end|>")
        for rung, answers in result.items()
        for answer, case in zip(answers, cases(rung), strict=True)
    ]


@cache
def found_unquantized(rungs: tuple[int, ...]) -> tuple[bool, ...]:
    """Return which needles are found with a cache of the model's dtype."""
    return tuple(found_needles(answers_by_length("auto", rungs)))


def assert_needles_are_found(
    kind: str, rungs: tuple[int, ...], record: Callable[[str, object], None]
) -> None:
    """Assert as many found needles as with an unquantized cache, where promised, and equal bits for
    all drafters and graph modes.

    record: pytest's record_property, for --junitxml.
    """
    base = found_unquantized(rungs)
    assert all(base)
    (plain, *rest) = (answers_by_length(kind, rungs, **way) for way in drafters_and_graph_modes())
    actual = found_needles(plain)
    record("found", f"{sum(actual)} of {len(actual)}")
    if POINTS[kind] < 100:
        assert all(actual), plain
    for other in rest:
        assert other == plain


@pytest.mark.slow
@KINDS
def test_needles_up_to_14k(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, SHORT, record_property)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="32 K tokens take a CPU an hour")
@KINDS
def test_needles_at_32k(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, (32,), record_property)
