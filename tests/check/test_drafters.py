"""Every drafter in scenarios of the check, and a drafter that speculative_config names."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lockstep.check.drafters import drafters_of, requested_drafter, settings_with
from lockstep.check.engines import CheckEngine, build, build_plain
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.scenarios.examiner import Examiner
from lockstep.check.scenarios.generator import ScenarioGenerator
from lockstep.check.scenarios.scenario import Kind
from lockstep.models.checkpoint import Checkpoint
from lockstep.worker.executor import executor_of
from tests.selection import some_slow
from tests.spec.blocks import make_block_model
from tests.spec.heads import make_head
from tests.tiny_model import CONFIG, LLAMA, THREE_LAYERS, make_model

SCENARIOS = range(2)
"""Scenario 0 may have few rows and pages; scenario 1 has many requests, so also preemptions."""
DUMMY = {"load_format": "dummy"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama with a tokenizer and random weights."""
    return make_model(tmp_path_factory.mktemp("target") / "model", LLAMA)


@pytest.fixture(scope="module")
def plain(target: Path) -> PlainRuns:
    """Return the plain runs of the target."""
    return PlainRuns(build_plain(str(target), DUMMY))


@pytest.fixture(scope="module")
def drafting(target: Path) -> dict[str, dict[str, Any]]:
    """Return the speculative_config of each drafter by name."""
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    aux_layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    make_head(target.parent / "head", vocab, 48, width=40, eagle_config=aux_layers)
    draft_model = make_model(target.parent / "draft", LLAMA, num_hidden_layers=1, hidden_size=36)
    recurrent = make_model(target.parent / "recurrent", CONFIG, **THREE_LAYERS)
    make_block_model(target.parent / "blocks", vocab, 48, [0, 1, 2])
    return {
        "eagle3": {"method": "eagle3", "model": str(target.parent / "head")},
        "draft_model": {"method": "draft_model", "model": str(draft_model)},
        "recurrent": {"method": "draft_model", "model": str(recurrent)},
        "dflash": {"method": "dflash", "model": str(target.parent / "blocks")},
        "suffix": {"method": "suffix"},
    }


@pytest.mark.default_cases("recurrent")
@pytest.mark.parametrize(
    ("name", "drafts"),
    some_slow(
        product(("eagle3", "draft_model", "recurrent", "dflash", "suffix"), (3, 15)),
        (("eagle3", 15), ("draft_model", 3), ("recurrent", 3), ("dflash", 15), ("suffix", 15)),
    ),
)
def test_scenarios_give_the_plain_outputs(
    target: Path, plain: PlainRuns, drafting: dict[str, Any], name: str, drafts: int
) -> None:
    """K=3 has a fixed number of drafts; K=15 has one that changes at every step."""
    shared = {**DUMMY, "speculative_config": drafting[name]}
    method = drafting[name]["method"]

    def build_kind(kind: Kind) -> CheckEngine:
        return build(str(target), settings_with(kind.settings(), shared), kind.hooks())

    examiner = Examiner(plain, build_kind)
    generator = ScenarioGenerator(plain, drafts, (method,), ("none",))
    num_drafted = 0
    for index in SCENARIOS:
        scenario = generator.scenario(index)
        kind = replace(scenario.kind, drafter=method, drafts=drafts, changing=drafts > 3)
        result = examiner.examine(replace(scenario, kind=kind))
        assert result.difference is None
        num_drafted += result.events["draft tokens"]
    assert num_drafted


def test_only_engines_of_its_method_get_its_keys() -> None:
    requested = {"method": "eagle3", "model": "here", "num_speculative_tokens": 5}
    shared = {"dtype": "float32", "speculative_config": requested}
    matching = {"method": "eagle3", "num_speculative_tokens": 2}
    other = {"method": "ngram", "num_speculative_tokens": 2}
    for drafting, expected in (
        (matching, {**matching, "model": "here"}),
        (other, other),
        (None, None),
    ):
        merged = settings_with({"speculative_config": drafting, "seed": 1}, shared)
        assert merged == {"dtype": "float32", "seed": 1, "speculative_config": expected}


def test_a_drafter_that_is_named_is_checked(plain: PlainRuns) -> None:
    checkpoint = executor_of(plain.llm.engine).checkpoint
    allowed, left_out = drafters_of(checkpoint, None)
    assert "eagle3" not in allowed
    assert left_out["eagle3"].startswith("it needs an EAGLE-3 head")
    allowed, left_out = drafters_of(checkpoint, {"method": "eagle3", "model": "here"})
    assert "eagle3" in allowed
    assert "eagle3" not in left_out


@pytest.mark.parametrize(
    ("requested", "method"),
    [({"model": "small"}, "draft_model"), ({"method": "qwen3_next_mtp"}, "mtp")],
)
def test_a_drafter_has_one_name(target: Path, requested: dict[str, Any], method: str) -> None:
    shared = {"speculative_config": requested}
    resolved = requested_drafter(shared)
    assert resolved == {**requested, "method": method}
    engine_settings = {"speculative_config": {"method": method, "num_speculative_tokens": 2}}
    assert settings_with(engine_settings, shared)["speculative_config"] == {
        **resolved,
        "num_speculative_tokens": 2,
    }
    assert method in drafters_of(Checkpoint.read(target), resolved)[0]
