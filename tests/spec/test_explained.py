"""lockstep explain and the floor know every drafter, here and for a GPU that is not there."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from tests.spec.heads import make_head
from tests.tiny_model import CONFIG, LLAMA, make_model

LAYERS = {
    "eagle3": {"draft", "drafter"},
    "draft_model": {"draft.head", "draft.layers.0", "draft.norm", "drafter"},
    "suffix": {"drafter"},
    "ngram": {"drafter"},
}
"""The layers that a drafter adds."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of seven layers without weights; beside it a head and a draft model."""
    root = tmp_path_factory.mktemp("explained")
    folder = make_model(root / "target", LLAMA, num_hidden_layers=7)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    make_head(root / "eagle3", vocab, 48)
    make_model(root / "draft_model", LLAMA, num_hidden_layers=1)
    return folder


def explained(target: Path, method: str, *more: str) -> dict[str, Any]:
    """What lockstep prints as JSON."""
    own = target.parent / method
    drafting = {"method": method, **({"model": str(own)} if own.exists() else {})}
    asked = (*more, "--model", str(target), "--speculative-config", json.dumps(drafting), "--json")
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", LAYERS)
@pytest.mark.parametrize("where", [("--load-format", "dummy"), ("--arch", "sm_90")], ids=" ".join)
def test_the_layers_of_a_drafter_are_named(
    target: Path, method: str, where: tuple[str, ...]
) -> None:
    found = explained(target, method, "explain", *where)
    layers = {one["layer"] for one in found["layers"] if one["layer"].startswith("draft")}
    assert layers == LAYERS[method]
    plain = explained(target, "ngram", "explain", *where)["plan"]["page_bytes"]
    assert (found["plan"]["page_bytes"] > plain) == (method in ("eagle3", "draft_model"))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_floor_counts_a_pass_for_each_draft(target: Path, method: str) -> None:
    found = explained(target, method, "bench", "offline", "--floor")
    assert found["drafts_floor_ms"] > 0
    none = explained(target, "ngram", "bench", "offline", "--floor")
    assert none["drafts_floor_ms"] == 0
    assert found["verify_floor_ms"] == none["verify_floor_ms"]


@pytest.mark.parametrize("where", ["sm_80", "sm_90"])
def test_a_packed_head_that_a_draft_knows_in_part(tmp_path: Path, where: str) -> None:
    """As nvidia/Qwen3.6-35B-A3B-NVFP4: the head is packed, and the draft has some rows of it."""
    four = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    settings = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"lm_head": four, "model.layers.0.mlp": four},
    }
    sizes = {"vocab_size": 8192, "tie_word_embeddings": False, "hidden_size": 256}
    folder = make_model(tmp_path / "m", CONFIG, **sizes, quantization_config=settings)
    mtp = json.dumps({"method": "mtp", "draft_vocab_size": 4096})
    asked = ("explain", "--arch", where, "--model", str(folder), "--speculative-config", mtp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, (*asked, "--json"), catch_exceptions=False)
    found = json.loads(done.stdout)
    heads = {
        (one["layer"], one["size"], one["storage_format"]) for one in found["layers"] if one["size"]
    }
    assert ("head", "8192x256", "Fp4Weight()") in heads
    assert ("draft", "4096x256", "") in heads
