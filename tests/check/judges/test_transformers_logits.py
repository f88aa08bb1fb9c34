"""The plain logits equal those of transformers, and a fault of the model code is detected."""

from collections.abc import Callable

import pytest
import torch

from lockstep.check.engines import CheckEngine, build_plain
from lockstep.check.judges import transformers_logits
from lockstep.check.judges.transformers_logits import (
    load_oracle,
    relative_difference,
    run_oracle,
    why_no_oracle,
)
from lockstep.check.report.report import Report
from lockstep.layers.rotary import Rotary
from lockstep.llm import LLM
from lockstep.worker.executor import worker_of


@pytest.fixture(scope="module")
def plain() -> CheckEngine:
    """Return the plain engine of the bundled model."""
    return build_plain(None, {})


@pytest.fixture
def other(plain: CheckEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the oracle once, and reduce the comparison to four prompts."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(transformers_logits, "load_oracle", LOADED.setdefault("it", cached(plain)))
    short = transformers_logits.short_prompts
    monkeypatch.setattr(transformers_logits, "short_prompts", lambda llm: short(llm)[:3])
    monkeypatch.setattr(transformers_logits, "LONG_PROMPT", 90)


LOADED: dict[str, Callable[[LLM], torch.nn.Module]] = {}


def cached(plain: CheckEngine) -> Callable[[LLM], torch.nn.Module]:
    model = load_oracle(plain.llm)
    return lambda llm: model


def test_the_plain_run_agrees(plain: CheckEngine, other: None) -> None:
    report = Report("quick", "")
    difference = run_oracle(plain, report)
    assert difference is not None and difference < 2e-5
    assert report.failed == 0 and report.cases == 4


def test_model_fault_is_detected(plain: CheckEngine, other: None) -> None:
    report = Report("quick", "")
    rotary = next(m for m in worker_of(plain.engine).model.modules() if isinstance(m, Rotary))
    angles = rotary.sin
    rotary.sin = angles * 0.99
    try:
        run_oracle(plain, report)
    finally:
        rotary.sin = angles
    assert report.failed == report.cases == 4
    assert "of their norm; allowed: 0.0001" in report.failures[0].what


def test_relative_difference_ignores_a_constant() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert float(relative_difference(rows + 4, rows).max()) < 1e-6
    assert float(relative_difference(rows * 1.01, rows).max()) == pytest.approx(0.01, rel=1e-3)


def test_random_weights_have_no_oracle(model: str) -> None:
    llm = LLM(model, load_format="dummy", max_model_len=128, max_num_seqs=1)
    assert why_no_oracle(llm, None) == "the weights are random: transformers cannot load them"


def test_quantized_weights_have_no_oracle() -> None:
    llm = LLM(quantization="int4", max_model_len=256)
    reason = "the weights are quantized: transformers would read other values"
    assert why_no_oracle(llm, None) == reason


def test_oracle_needs_memory_and_transformers(
    plain: CheckEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_logits, "find_spec", lambda name: "a module")
    few = why_no_oracle(plain.llm, 1 << 20)
    assert few is not None and "0.0 GiB of memory are free" in few
    assert why_no_oracle(plain.llm, 1 << 40) is None
    monkeypatch.setattr(transformers_logits, "find_spec", lambda name: None)
    assert why_no_oracle(plain.llm, None) == "transformers is not installed"


def test_model_that_transformers_refuses_is_left_out(
    plain: CheckEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(llm: LLM) -> None:
        raise ValueError("unknown model_type\nmore lines")

    monkeypatch.setattr(transformers_logits, "why_no_oracle", lambda llm, free: None)
    monkeypatch.setattr(transformers_logits, "load_oracle", refuse)
    report = Report("quick")
    assert run_oracle(plain, report) is None
    assert (report.cases, report.failed) == (0, 0)
    assert report.not_exercised() == {
        "transformers cannot load the model (ValueError: unknown model_type)": [
            "logits against transformers"
        ]
    }
