"""F2 and F4 with the other drafters: EAGLE-3, a draft model, suffix lookup.

On a hybrid, whose state must match the accepted drafts, and on latent attention, as in the report
of F4 (Kimi-K2 and EAGLE-3).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.regressions.conftest import PARAMS, PROMPTS, answers, engine_over, run_null_rows
from tests.spec.heads import make_head
from tests.tiny_model import CONFIG, KIMI, QWEN3, THREE_LAYERS, make_model

TARGETS: dict[str, dict[str, Any]] = {
    "hybrid": {**CONFIG, **THREE_LAYERS},
    "latent": {**KIMI, "num_hidden_layers": 3},
}
METHODS = ("eagle3", "draft_model", "suffix")
WINDOW = 4
SLOW = pytest.mark.slow
PAIRS = [(kind, method) for kind in TARGETS for method in METHODS]
DEFAULT = (("hybrid", "draft_model"), ("latent", "eagle3"))
CASES = pytest.mark.parametrize(
    ("kind", "method"),
    [pair if pair in DEFAULT else pytest.param(*pair, marks=SLOW) for pair in PAIRS],
)
"""By default both targets, each with another method that has a module."""


class Case:
    """A target with random weights, its plain answers, and its drafters."""

    def __init__(self, folder: Path, base: dict[str, Any]) -> None:
        self.target = make_model(folder / "target", base)
        raw = json.loads((self.target / "config.json").read_text())
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        make_head(folder / "head", raw["vocab_size"], raw["hidden_size"], eagle_config=taps)
        mine = make_model(folder / "draft", QWEN3, num_hidden_layers=1)
        self.folders = {"eagle3": folder / "head", "draft_model": mine, "suffix": None}
        self.plain = answers(engine_over(self.target))

    def engine(self, method: str, k: int = WINDOW - 1, **settings: Any) -> Any:
        """Return an engine with a drafter."""
        return engine_over(self.target, method, k, drafts_with=self.folders[method], **settings)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {kind: Case(tmp_path_factory.mktemp(kind), base) for kind, base in TARGETS.items()}


@pytest.mark.default_cases("latent")
@CASES
@pytest.mark.parametrize("k", [pytest.param(1, marks=SLOW), 3, pytest.param(15, marks=SLOW)])
def test_answers_equal_those_without_drafts(
    cases: dict[str, Case], kind: str, method: str, k: int
) -> None:
    """Run a long prompt in small chunks next to rows that draft, and again from the cache."""
    llm = cases[kind].engine(method, k, max_num_batched_tokens=64)
    assert answers(llm) == cases[kind].plain
    assert answers(llm) == cases[kind].plain


@pytest.mark.default_cases("hybrid")
@CASES
def test_changing_drafts_and_preemption_keep_the_answers(
    cases: dict[str, Case], kind: str, method: str
) -> None:
    """A different number of drafts in every step, including 0; preemption; a small pool."""
    llm = cases[kind].engine(method, 7, changing=True, preempt_every=3, num_gpu_blocks=12)
    assert answers(llm) == cases[kind].plain
    assert llm.engine.scheduler.preemptions > 0


@CASES
@pytest.mark.parametrize("bucket", [pytest.param(1, marks=SLOW), 3, pytest.param(8, marks=SLOW)])
def test_null_rows_need_a_pool_of_two_pages(
    cases: dict[str, Case], kind: str, method: str, bucket: int
) -> None:
    """Every uniform step of null rows is valid and leaves no drafts outside of the null row; rows
    run afterwards."""
    llm = cases[kind].engine(method, row_buckets=(bucket, 8), num_gpu_blocks=2, num_snapshots=0)
    run_null_rows(llm, bucket, WINDOW)
    short = PROMPTS[1]
    assert answers(llm, [short], PARAMS) == [cases[kind].plain[1]]
