"""F3 (vLLM #40880, #40914), as reported by users: tool calls and needles with a quantized KV cache.

The bundled model answers; within a format no drafter changes a character.
"""

from collections.abc import Callable
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from training.corpus import stdlib_text
from training.evaluate import SETS, calls_in, samples

TOOLS = next(part for part in SETS if part.name == "tool calls")
NEEDLE = next(part for part in SETS if part.name == "needle at 1 K")
GREEDY = SamplingParams(temperature=0.0, max_tokens=160, skip_special_tokens=False)
DRAFTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}


PAGES = 8 * 2048 // 64 + 1
"""Pages of a cache for all rows, so that several engines fit on one GPU."""
POINTS: dict[str, float] = {
    "fp8_e4m3": 1,
    "fp8_e5m2": 100,
    "int8_per_token_head": 1,
    "turboquant_k8v4": 1,
    "turboquant_4bit_nc": 3,
    "turboquant_k3v4_nc": 100,
    "turboquant_3bit_nc": 100,
}
"""Format -> maximum loss in percent; 100: the loss is recorded, not bounded."""


class Rates:
    """Answers of the bundled model to tool calls and needles by format and drafter, on a GPU if
    present."""

    def __init__(self, calls: int, needles: int) -> None:
        stdlib_text.load_filler()
        self.tools = samples(TOOLS, calls)
        self.needles = samples(NEEDLE, needles)

    def answers(self, kind: str, drafter: str) -> list[str]:
        """Return the answers, tool calls first."""
        llm = LLM(
            kv_cache_dtype=kind,
            speculative_config=DRAFTS[drafter],
            max_model_len=2048,
            max_num_seqs=8,
            num_gpu_blocks=PAGES,
            num_snapshots=0,
        )
        cases = [*self.tools, *self.needles]
        outs = llm.generate([case.prompt for case in cases], GREEDY)
        return [out.outputs[0].text.removesuffix("<|im_end|>") for out in outs]

    def success_rates(self, result: list[str]) -> dict[str, float]:
        """Return the percentages of correct tool calls and of found needles."""
        expected = [c.answer.removesuffix("<|im_end|>") for c in (*self.tools, *self.needles)]
        calls = [
            calls_in(text, case.tools) == calls_in(answer, case.tools)
            for text, answer, case in zip(result, expected, self.tools, strict=False)
        ]
        count = len(self.tools)
        pairs = zip(result[count:], expected[count:], strict=True)
        needles = [text == answer for text, answer in pairs]
        return {"calls": _percent(calls), "needles": _percent(needles)}


def _percent(right: list[bool]) -> float:
    return 100 * sum(right) / len(right)


def assert_within_points(rates: Rates, kind: str, record: Callable[[str, object], None]) -> None:
    """Assert that the format loses no more than its points, and that no drafter changes a character
    within it.

    record: pytest's record_property, for --junitxml.
    """
    base = rates.success_rates(rates.answers("auto", "none"))
    assert min(base.values()) > 90
    plain = rates.answers(kind, "none")
    actual = rates.success_rates(plain)
    record("format", kind)
    record("unpacked", base)
    record("packed", actual)
    for name, rate in actual.items():
        assert rate >= base[name] - POINTS[kind], (kind, actual, base)
    for drafter in ("ngram", "mtp"):
        assert rates.answers(kind, drafter) == plain, (kind, drafter)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTS)
def test_quantized_cache_keeps_tool_calls_and_needles(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    assert_within_points(Rates(calls=6, needles=2), kind, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POINTS)
def test_quantized_cache_keeps_tool_calls_and_needles_at_length(
    kind: str, record_property: Callable[[str, object], None]
) -> None:
    assert_within_points(Rates(calls=200, needles=40), kind, record_property)
