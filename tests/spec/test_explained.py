"""lockstep explain and the bandwidth floor include every drafter, on this machine and for an absent
GPU."""

import json
import warnings
from functools import cache
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
"""Layers that a drafter adds."""
STEP_SIZE = ("--max-num-seqs", "4", "--max-num-batched-tokens", "256")
"""One size of steps to run dry. Without it, the planner compares several."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama of seven layers without weights, with a head and a draft model in sibling
    folders."""
    root = tmp_path_factory.mktemp("explained")
    folder = make_model(root / "target", LLAMA, num_hidden_layers=7)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    make_head(root / "eagle3", vocab, 48)
    make_model(root / "draft_model", LLAMA, num_hidden_layers=1)
    return folder


def run_json(target: Path, method: str, *more: str) -> dict[str, Any]:
    """Return lockstep's JSON output."""
    draft_folder = target.parent / method
    has_folder = draft_folder.exists()
    drafting = {"method": method, **({"model": str(draft_folder)} if has_folder else {})}
    requested = (
        *more,
        "--model",
        str(target),
        "--speculative-config",
        json.dumps(drafting),
        "--json",
    )
    done = CliRunner().invoke(app, requested, catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


@cache
def page_bytes_without_module(target: Path, where: tuple[str, ...]) -> int:
    """Return the bytes of a page of the target alone."""
    pages: int = run_json(target, "ngram", "explain", *where)["plan"]["page_bytes"]
    return pages


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("method", LAYERS)
@pytest.mark.parametrize(
    "where",
    [("--load-format", "dummy"), ("--arch", "sm_90", *STEP_SIZE)],
    ids=lambda where: " ".join(where[:2]),
)
def test_explain_names_drafter_layers(target: Path, method: str, where: tuple[str, ...]) -> None:
    actual = run_json(target, method, "explain", *where)
    layers = {one["layer"] for one in actual["layers"] if one["layer"].startswith("draft")}
    assert layers == LAYERS[method]
    plain = page_bytes_without_module(target, where)
    assert (actual["plan"]["page_bytes"] > plain) == (method in ("eagle3", "draft_model"))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_floor_counts_one_pass_per_draft(target: Path, method: str) -> None:
    actual = run_json(target, method, "bench", "offline", "--floor")
    assert actual["drafts_floor_ms"] > 0
    none = run_json(target, "ngram", "bench", "offline", "--floor")
    assert none["drafts_floor_ms"] == 0
    assert actual["verify_floor_ms"] == none["verify_floor_ms"]


@pytest.mark.default_cases("sm_90")
@pytest.mark.parametrize("where", ["sm_80", "sm_90"])
def test_reduced_draft_of_quantized_head(tmp_path: Path, where: str) -> None:
    """The head is quantized and the draft module copies some of its rows.

    nvidia/Qwen3.6-35B-A3B-NVFP4 has these settings.
    """
    nvfp4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    settings = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"lm_head": nvfp4, "model.layers.0.mlp": nvfp4},
    }
    sizes = {"vocab_size": 8192, "tie_word_embeddings": False, "hidden_size": 256}
    folder = make_model(tmp_path / "m", CONFIG, **sizes, quantization_config=settings)
    mtp = json.dumps({"method": "mtp", "draft_vocab_size": 4096})
    requested = ("explain", "--arch", where, "--model", str(folder), "--speculative-config", mtp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(app, (*requested, *STEP_SIZE, "--json"), catch_exceptions=False)
    actual = json.loads(done.stdout)
    heads = {
        (one["layer"], one["size"], one["storage_format"])
        for one in actual["layers"]
        if one["size"]
    }
    assert ("head", "8192x256", "Fp4Weight()") in heads
    assert ("draft", "4096x256", "") in heads
