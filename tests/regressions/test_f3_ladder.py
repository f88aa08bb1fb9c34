"""F3 (vLLM #40880, #40914), as users saw it: needles in prompts of 1 K to 32 K tokens, over every
KV format, with drafts, and on a GPU with graphs of every mode.

The bundled model was made for 16,384 tokens. For prompts of 32 K it is told that it has more
positions; its rope needs nothing else.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from tests.regressions.test_f3_rates import DRAFTS, POINTS
from training import text
from training.evaluate import Set, samples

RUNGS = {1: 2_300, 4: 9_500, 8: 19_000, 14: 33_000, 32: 75_000}
"""Thousands of tokens -> characters."""
SHORT = (1, 4, 8, 14)
NEEDLES = 2
"""In each prompt length."""
ROWS = 2
POSITIONS = 40_960
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, skip_special_tokens=False)
KINDS = pytest.mark.parametrize("kind", POINTS)
Found = dict[int, list[str]]


@pytest.fixture(scope="module", autouse=True)
def filler() -> None:
    """The text around the needles."""
    text.load_filler()


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


def ask(kind: str, rungs: tuple[int, ...], **way: Any) -> Found:
    """The answers of the bundled model, by rung."""
    llm = LLM(
        kv_cache_dtype=kind,
        hf_overrides={"max_position_embeddings": POSITIONS},
        max_num_seqs=ROWS,
        num_gpu_blocks=ROWS * POSITIONS // 64 + 1,
        num_snapshots=0,
        **way,
    )
    found: Found = {}
    for rung in rungs:
        outs = llm.generate([case.prompt for case in cases(rung)], GREEDY)
        assert all(len(out.prompt_token_ids) > 900 * rung for out in outs)
        found[rung] = [out.outputs[0].text.removesuffix("<|im_end|>") for out in outs]
    return found


def right(found: Found) -> list[bool]:
    """Whether each needle was found."""
    return [
        answer == case.answer.removesuffix("<|im_end|>")
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
    answers to the last character. record: pytest's record_property, for --junitxml."""
    base = unpacked(rungs)
    assert all(base)
    (plain, *others) = (ask(kind, rungs, **way) for way in ways())
    found = right(plain)
    record("found", f"{sum(found)} of {len(found)}")
    if POINTS[kind] < 100:
        assert all(found), plain
    assert all(other == plain for other in others)


@pytest.mark.slow
@KINDS
def test_the_needle_ladder(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, SHORT, record_property)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="32 K tokens take a CPU an hour")
@KINDS
def test_the_longest_rung(kind: str, record_property: Callable[[str, object], None]) -> None:
    assert_needles_are_found(kind, (32,), record_property)
