"""The table of packed weights' tiles: what is timed is written, what has other bits is not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.bench import tune_packed as tuner
from lockstep.bench.dimensions import MODELS
from lockstep.bench.tune_packed import Job, Tuned
from lockstep.bench.tune_packed import _compile as compile_all
from lockstep.errors import ConfigError
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.linear import quantized_tuning, tuning
from lockstep.kernels.linear.quantized_tuning import QuantizedTile

BEST = QuantizedTile(16, 64, 128, registers=96)
OTHER = QuantizedTile(64, 64, 128)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is none, and a single process."""

    def measured(job: Job, dtype: torch.dtype, residual: bool) -> Tuned:
        weight = LAYOUTS[job.layout](job.n, job.k, "meta")
        key = quantized_tuning.table_key(weight, dtype, 90)
        return Tuned(job, key, [(float(job.tokens), BEST), (1e6, OTHER)], {})

    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(tuner, "number_of", lambda device: 90)
    monkeypatch.setattr(tuner, "_tune", measured)
    monkeypatch.setattr(tuner, "_compile", lambda pool, todo, dtype: None)


def test_the_best_tile_of_every_shape_is_written_at_once(tmp_path: Path, pretended: None) -> None:
    path = tmp_path / "tuning.json"
    known = quantized_tuning.load_table()
    kept = {"sm90/bfloat16/nvfp4/7x7": {1: OTHER}}
    tuning.save_table(kept, path)
    model = MODELS["small"]
    shapes = {(n, k) for _, n, k in model.weights[:-1]}
    each = len(tuner.TUNED) * len(shapes)
    tokens = []
    for done, tuned in enumerate(tuner.tune_packed([model], torch.bfloat16, path, (1, 64)), 1):
        tokens.append(tuned.job.tokens)
        written = json.loads(path.read_text())
        assert written[tuned.key][str(quantized_tuning.bucket(tuned.job.tokens))]
        assert len(written.keys() - known.keys()) == 1 + min(done, each)
    assert tokens == [1] * each + [64] * each
    found = quantized_tuning.load_table.__wrapped__(path)
    assert found.pop("sm90/bfloat16/nvfp4/7x7") == {1: OTHER}
    new = [row for key, row in found.items() if key not in known]
    assert len(new) == each and all(row == {1: BEST, 33: BEST} for row in new)
    assert {key: found[key] for key in known} == known
    assert str(tuned).startswith("64 tokens, int4 asymmetric") and "64.0 us" in str(tuned)


def test_one_process_compiles_a_tile_of_a_layout(pretended: None) -> None:
    (todo,) = tuner.jobs([MODELS["Qwen3.6-27B"]], (1,), ("int4",))
    made = []

    def submit(run: Any, group: list[Job], tile: QuantizedTile, dtype: torch.dtype) -> Any:
        made.append((tile, {job.k for job in group}))
        return SimpleNamespace(result=lambda: None)

    compile_all(SimpleNamespace(submit=submit), todo, torch.bfloat16)
    wanted: dict[QuantizedTile, set[int]] = {}
    for job in todo:
        for tile in job.tiles:
            wanted.setdefault(tile, set()).add(job.k)
    assert len(made) == len(wanted) and dict(made) == wanted


def test_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        next(tuner.tune_packed([MODELS["small"]], torch.bfloat16, tmp_path / "tuning.json"))
