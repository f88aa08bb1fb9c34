"""F3 (vLLM #40880, #40914), as users saw it: needles in prompts of 1 K to 32 K tokens, over every
KV format, with drafts, and on a GPU with graphs of every mode.

The bundled model was made for 16,384 tokens. For prompts of 32 K its positions are divided by two
("linear" rope): without that it found 2 needles of 6 there, in a cache of its own dtype.
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
"""In each prompt length."""
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
    """The text around the needles."""
    stdlib_text.load_filler()


def ways() -> Iterator[dict[str, Any]]:
    """Drafters and, on a GPU, the graph modes."""
    for drafter in DRAFTS.values():
        yield {"speculative_config": drafter}
    if torch.cuda.is_available():
        for mode in ("piecewise", "none"):
            yield {"speculative_config": DRAFTS["mtp"], "cuda_graph_mode": mode}


def cases(rung: int) -> list[Any]:
    """The prompts of a rung with their answers."""
    part = Set(f"needle at {rung} K", "needle", NEEDLES, characters=RUNGS[rung])
    return samples(part, NEEDLES)


def stretched() -> dict[str, Any]:
    """Settings with which the bundled model reads prompts of the last rung."""
    config = json.loads((Path(find_model(None)) / "config.json").read_text())
    rope = config["rope_parameters"] | {"rope_type": "linear", "factor": 2.0}
    return {"max_position_embeddings": POSITIONS, "rope_parameters": rope}


def answer_of(output: Any) -> Answer:
    """The answer to a request."""
    (found,) = output.outputs
    steps = zip(found.token_ids, found.logprobs, strict=True)
    return Answer(
        found.text.removesuffix("<|im_end|>"),
        tuple(step[token].logprob for token, step in steps),
    )


def ask(kind: str, rungs: tuple[int, ...], **way: Any) -> Found:
    """The answers of the bundled model, by rung."""
    llm = LLM(
        kv_cache_dtype=kind,
        hf_overrides=stretched() if max(rungs) > max(SHORT) else {},
        max_num_seqs=ROWS,
        num_gpu_blocks=ROWS * POSITIONS // 64 + 1,
        num_snapshots=0,
        **way,
    )
    found: Found = {}
    for rung in rungs:
        outs = llm.generate([case.prompt for case in cases(rung)], GREEDY)
        assert all(len(out.prompt_token_ids) > 900 * rung for out in outs)
        found[rung] = [answer_of(out) for out in outs]
    return found


def right(found: Found) -> list[bool]:
    """Whether each needle was found."""
    return [
        answer.text == case.answer.removesuffix("<|im_end|>")
        for rung, answers in found.items()
        for answer, case in zip(answers, cases(rung), strict=True)
    ]


@cache
def unpacked(rungs: tuple[int, ...]) -> tuple[bool, ...]:
    """Which needles are found in a cache of the model's dtype."""
    return tuple(right(ask("auto", rungs)))


def assert_needles_are_found(
    kind: str, rungs: tuple[int, ...], record: Callable[[str, object], None]
) -> None:
    """As many as in a cache that is not packed, where that is promised; in every way the same
    answers to the last bit. record: pytest's record_property, for --junitxml."""
    base = unpacked(rungs)
    assert all(base)
    (plain, *others) = (ask(kind, rungs, **way) for way in ways())
    found = right(plain)
    record("found", f"{sum(found)} of {len(found)}")
    if POINTS[kind] < 100:
        assert all(found), plain
    for other in others:
        assert other == plain


@pytest.mark.slow
@KINDS
def test_the_needle_ladder(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, SHORT, record_property)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="32 K tokens take a CPU an hour")
@KINDS
def test_the_longest_rung(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, (32,), record_property)
