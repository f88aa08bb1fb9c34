"""The memory plan of a GPU that is not there: its figures agree, and the table is what it says."""

import gc
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.memory_plans import table
from lockstep.config import EngineConfig
from lockstep.worker.explain import explain_absent
from tests.tiny_model import make_model

ROOT = Path(__file__).parent.parent.parent
PARTS = ("weights", "overhead", "table", "step", "graphs", "pages", "state")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid's folder."""
    return make_model(tmp_path_factory.mktemp("absent"))


def planned(folder: Path, total: int | None, **settings: Any) -> dict[str, Any]:
    """The plan of a GPU with `total` bytes."""
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    settings = {"max_model_len": 512, "speculative_config": spec, **settings}
    config = EngineConfig.read(model=str(folder), load_format="dummy", **settings)
    return explain_absent(config, "sm_86", total)["plan"]


def test_a_gpu_of_the_needed_bytes_fits_and_a_smaller_one_does_not(folder: Path) -> None:
    needed = planned(folder, None)["needed_bytes"]
    exact = planned(folder, needed + 1)
    assert exact["fits"] and exact["max_num_seqs"] == 1 and exact["max_num_batched_tokens"] == 64
    assert exact["cache_tokens"] >= 512
    assert sum(exact[f"{part}_bytes"] for part in PARTS) <= exact["available_bytes"]
    short = planned(folder, needed - 10_000)
    assert not short["fits"] and "GB are missing" in short["why"]
    assert short["needed_bytes"] == exact["needed_bytes"] == needed


def test_a_roomy_gpu_gets_the_preferred_sizes(folder: Path) -> None:
    plan = planned(folder, 24 * 10**9)
    assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (256, 2048)
    assert plan["row_buckets"][-1] == 256 and plan["notes"][0].startswith("max_num_seqs=256")


def test_nothing_of_a_dry_run_stays_behind(tmp_path: Path) -> None:
    """A tensor without memory that a cache keeps would be read by the kernels of the real model.

    Launches of packed weights keep a counter on the GPU, see lockstep.kernels.epochs.
    """
    folder = make_model(tmp_path, hidden_size=5120, intermediate_size=17408)
    config = EngineConfig.read(model=str(folder), load_format="dummy", quantization="int4")
    explain_absent(config, "sm_90", 24 * 10**9)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is FakeTensor]


def test_typed_sizes_are_taken_or_refused(folder: Path) -> None:
    needed = planned(folder, None)["needed_bytes"]
    plan = planned(folder, 24 * 10**9, max_num_seqs=7, max_num_batched_tokens=300)
    assert (plan["max_num_seqs"], plan["max_num_batched_tokens"]) == (7, 300)
    refused = planned(folder, needed, max_num_seqs=1024)
    assert not refused["fits"] and "or change max_num_seqs=1024." in refused["why"]


@pytest.mark.slow
def test_the_table_of_reported_command_lines_is_what_explain_plans() -> None:
    """Or else: python benchmarks/memory_plans.py, into docs/models.md."""
    assert table() in (ROOT / "docs" / "models.md").read_text()
