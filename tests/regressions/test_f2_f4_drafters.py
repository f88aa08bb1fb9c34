"""F2 and F4 with every other drafter: EAGLE-3, a draft model, suffix lookup.

On a hybrid, whose state must stand where the accepted drafts end, and on latent attention, as in
the report of F4 (Kimi-K2 and EAGLE-3).
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
WHERE = pytest.mark.parametrize("kind", TARGETS)
SELDOM = pytest.mark.slow
HOW = pytest.mark.parametrize("method", METHODS)


class Case:
    """A target with random weights, its plain answers, and what drafts for it."""

    def __init__(self, folder: Path, base: dict[str, Any]) -> None:
        self.target = make_model(folder / "target", base)
        raw = json.loads((self.target / "config.json").read_text())
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        make_head(folder / "head", raw["vocab_size"], raw["hidden_size"], eagle_config=taps)
        own = make_model(folder / "draft", QWEN3, num_hidden_layers=1)
        self.folders = {"eagle3": folder / "head", "draft_model": own, "suffix": None}
        self.plain = answers(engine_over(self.target))

    def engine(self, method: str, k: int = WINDOW - 1, **settings: Any) -> Any:
        """An engine that drafts so."""
        return engine_over(self.target, method, k, drafts_with=self.folders[method], **settings)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {kind: Case(tmp_path_factory.mktemp(kind), base) for kind, base in TARGETS.items()}


@WHERE
@HOW
@pytest.mark.parametrize("k", [pytest.param(1, marks=SELDOM), 3, pytest.param(15, marks=SELDOM)])
def test_drafters_change_no_answer_on_gpu(
    cases: dict[str, Case], kind: str, method: str, k: int
) -> None:
    """A long prompt in small chunks beside rows that draft, and all of it again from the cache."""
    llm = cases[kind].engine(method, k, max_num_batched_tokens=64)
    assert answers(llm) == cases[kind].plain
    assert answers(llm) == cases[kind].plain


@WHERE
@HOW
def test_drafts_that_come_and_go_and_rows_that_move(
    cases: dict[str, Case], kind: str, method: str
) -> None:
    """Another number of drafts in every step, 0 among them; preemption; a small pool."""
    llm = cases[kind].engine(method, 7, changing=True, preempt_every=3, num_gpu_blocks=12)
    assert answers(llm) == cases[kind].plain
    assert llm.engine.scheduler.preemptions > 0


@WHERE
@HOW
@pytest.mark.parametrize(
    "bucket", [pytest.param(1, marks=SELDOM), 3, pytest.param(8, marks=SELDOM)]
)
def test_null_rows_need_a_pool_of_two_pages(
    cases: dict[str, Case], kind: str, method: str, bucket: int
) -> None:
    """Every uniform step of null rows is legal and leaves no drafts outside of the null row; rows
    are served behind it."""
    llm = cases[kind].engine(method, row_buckets=(bucket, 8), num_gpu_blocks=2, num_snapshots=0)
    run_null_rows(llm, bucket, WINDOW)
    short = PROMPTS[1]
    assert answers(llm, [short], PARAMS) == [cases[kind].plain[1]]
