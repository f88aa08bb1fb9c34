"""The tuner for quantized weights writes the best tile of each shape."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.bench import tune_quantized
from lockstep.bench.dimensions import MODELS
from lockstep.bench.tune_quantized import TuningJob, TuningResult
from lockstep.bench.tune_quantized import _compile as compile_all
from lockstep.errors import ConfigError
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.linear import quantized_tuning, tuning
from lockstep.kernels.linear.quantized_tuning import QuantizedTile

BEST = QuantizedTile(16, 64, 128, registers=96)
OTHER = QuantizedTile(64, 64, 128)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to have a GPU, and tune in one process."""

    def fake_tune(job: TuningJob, dtype: torch.dtype, residual: bool) -> TuningResult:
        weight = LAYOUTS[job.layout](job.n, job.k, "meta")
        key = quantized_tuning.table_key(weight, dtype, 90)
        return TuningResult(job, key, [(float(job.tokens), BEST), (1e6, OTHER)], {})

    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune_quantized, "sm_number", lambda device: 90)
    monkeypatch.setattr(tune_quantized, "_tune", fake_tune)
    monkeypatch.setattr(tune_quantized, "_compile", lambda pool, jobs, dtype: None)


def test_the_best_tile_of_every_shape_is_written_at_once(tmp_path: Path, fake_gpu: None) -> None:
    path = tmp_path / "tuning.json"
    committed = quantized_tuning.load_table()
    other_table = {"sm90/bfloat16/nvfp4/7x7": {1: OTHER}}
    tuning.save_table(other_table, path)
    model = MODELS["small"]
    shapes = {(n, k) for _, n, k in model.weights[:-1]}
    num_shapes = len(tune_quantized.TUNED_LAYOUTS) * len(shapes)
    tokens = []
    for num_done, result in enumerate(
        tune_quantized.tune_quantized([model], torch.bfloat16, path, (1, 64)), 1
    ):
        tokens.append(result.job.tokens)
        written = json.loads(path.read_text())
        assert written[result.key][str(quantized_tuning.bucket(result.job.tokens))]
        assert len(written.keys() - committed.keys()) == 1 + min(num_done, num_shapes)
    assert tokens == [1] * num_shapes + [64] * num_shapes
    table = quantized_tuning.load_table.__wrapped__(path)
    assert table.pop("sm90/bfloat16/nvfp4/7x7") == {1: OTHER}
    new_rows = [row for key, row in table.items() if key not in committed]
    assert len(new_rows) == num_shapes and all(row == {1: BEST, 33: BEST} for row in new_rows)
    assert {key: table[key] for key in committed} == committed
    assert str(result).startswith("64 tokens, int4 asymmetric") and "64.0 us" in str(result)


def test_one_process_compiles_each_tile_of_a_layout(fake_gpu: None) -> None:
    (jobs,) = tune_quantized.tuning_jobs([MODELS["Qwen3.6-27B"]], (1,), ("int4",))
    submitted = []

    def submit(run: Any, group: list[TuningJob], tile: QuantizedTile, dtype: torch.dtype) -> Any:
        submitted.append((tile, {job.k for job in group}))
        return SimpleNamespace(result=lambda: None)

    compile_all(SimpleNamespace(submit=submit), jobs, torch.bfloat16)
    expected: dict[QuantizedTile, set[int]] = {}
    for job in jobs:
        for tile in job.tiles:
            expected.setdefault(tile, set()).add(job.k)
    assert len(submitted) == len(expected) and dict(submitted) == expected


def test_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        next(
            tune_quantized.tune_quantized(
                [MODELS["small"]], torch.bfloat16, tmp_path / "tuning.json"
            )
        )
