"""The memory plan of an absent GPU: its figures agree, and the table in docs/models.md equals the
plan."""

import gc
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.memory_plans import table
from lockstep.config import EngineConfig
from lockstep.worker import explain
from lockstep.worker.explain import explain_architecture
from lockstep.worker.memory_estimate import DryEngine
from lockstep.worker.memory_planner import PROMPT_GRAPHS
from tests.tiny_model import make_model

ROOT = Path(__file__).parent.parent.parent
STEP_SIZE = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
"""One size of steps to run dry. Without it, the planner compares several."""
PARTS = ("weights", "overhead", "table", "step", "graphs", "pages", "state")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny hybrid model's folder."""
    return make_model(tmp_path_factory.mktemp("absent"))


def plan_of(folder: Path, total: int | None, **settings: Any) -> dict[str, Any]:
    """Return the plan of a GPU with `total` bytes."""
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"max_model_len": 512, "speculative_config": spec, **settings}
    config = EngineConfig.read(model=str(folder), load_format="dummy", **settings)
    return explain_architecture(config, "sm_86", total)["plan"]


def test_needed_bytes_is_the_smallest_fitting_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One engine serves the three plans, which differ in the bytes of the GPU alone. It remembers
    # the bytes of each size of a step.
    make_engine = explain.DryEngine
    engines: dict[str, DryEngine] = {}

    def engine_of(config: EngineConfig, *arguments: Any) -> DryEngine:
        key = repr(config)
        engines[key] = engines.get(key) or make_engine(config, *arguments)
        return engines[key]

    monkeypatch.setattr(explain, "DryEngine", engine_of)
    needed = plan_of(folder, None)["needed_bytes"]
    exact = plan_of(folder, needed + 1)
    assert exact["fits"] and exact["max_num_seqs"] == 1
    # The graphs of prompts were given up before anything else.
    assert (exact["prompt_buckets"], exact["joint_graphs"]) == ((), 0)
    assert exact["cache_tokens"] >= 512
    assert sum(exact[f"{part}_bytes"] for part in PARTS) <= exact["available_bytes"]
    short = plan_of(folder, needed - 10_000)
    assert not short["fits"] and "GB are missing" in short["why"]
    assert short["needed_bytes"] == exact["needed_bytes"] == needed
    assert len(engines) == 1


def test_large_gpu_gets_preferred_sizes(folder: Path) -> None:
    plan = plan_of(folder, 24 * 10**9)
    assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (256, 2048)
    assert plan["row_buckets"][-1] == 256 and plan["notes"][0].startswith("max_num_seqs=256")
    assert plan["prompt_buckets"][-1] == 512, "max_model_len bounds them"
    assert plan["joint_graphs"] == PROMPT_GRAPHS[0].joint


def test_set_prompt_buckets_are_kept(folder: Path) -> None:
    plan = plan_of(folder, 24 * 10**9, prompt_buckets=(96, 300), **STEP_SIZE)
    assert (plan["prompt_buckets"], plan["joint_graphs"]) == ((96, 300), PROMPT_GRAPHS[0].joint)
    tight = plan_of(folder, plan["needed_bytes"] + 1, prompt_buckets=(96, 300), **STEP_SIZE)
    assert tight["fits"] and (tight["prompt_buckets"], tight["joint_graphs"]) == ((96, 300), 0)
    none = plan_of(folder, 24 * 10**9, prompt_buckets=(), **STEP_SIZE)
    assert (none["prompt_buckets"], none["joint_graphs"]) == ((), 0)


def test_explain_leaves_no_fake_tensors(tmp_path: Path) -> None:
    """A cached fake tensor would be read by the real model's kernels.

    Launches of quantized weights keep a counter on the GPU, see lockstep.kernels.epochs.
    """
    folder = make_model(tmp_path, hidden_size=5120, intermediate_size=17408)
    config = EngineConfig.read(
        model=str(folder), load_format="dummy", quantization="int4", **STEP_SIZE
    )
    explain_architecture(config, "sm_90", 24 * 10**9)
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is FakeTensor]


def test_products_with_fp8_activations_are_explained(folder: Path) -> None:
    config = EngineConfig.read(
        model=str(folder),
        load_format="dummy",
        quantization="fp8",
        activation_dtype="fp8",
        **STEP_SIZE,
    )
    explained = explain_architecture(config, "sm_90", 24 * 10**9)
    backends = {entry["backend"] for entry in explained["layers"] if entry["op"] == "fp8_linear"}
    tiles = [entry["tile"] for entry in explained["tiles"] if entry["op"] == "fp8_linear"]
    assert backends == {"hopper"}
    assert len({tile["tokens"] for tile in tiles}) > 1, "tiles follow the number of tokens"


@pytest.mark.slow
def test_explicit_sizes_are_used_or_refused(folder: Path) -> None:
    needed = plan_of(folder, None)["needed_bytes"]
    plan = plan_of(folder, 24 * 10**9, max_num_seqs=7, max_num_batched_tokens=300)
    assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (7, 300)
    refused = plan_of(folder, needed, max_num_seqs=1024)
    assert not refused["fits"] and "or change max_num_seqs=1024." in refused["why"]


@pytest.mark.slow
def test_models_table_equals_explain() -> None:
    """Regenerate docs/models.md with: python benchmarks/memory_plans.py"""
    assert table() in (ROOT / "docs" / "models.md").read_text()
