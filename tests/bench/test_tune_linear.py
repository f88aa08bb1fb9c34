"""The tuner writes the table that linear reads."""

from pathlib import Path

import pytest
import torch

from lockstep.bench.dimensions import MODELS
from lockstep.bench.tune_linear import tune_linears
from lockstep.errors import ConfigError
from lockstep.kernels.linear import tuning

BEST = tuning.Tile(16, 64, 64, 4, 4)
OTHER = tuning.Tile(64, 64, 64, 4, 4)


@pytest.fixture
def timed_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, int], int]]:
    """Pretend to have a GPU; return the timed calls: (tokens, weight shape, split_k)."""
    calls: list[tuple[int, tuple[int, int], int]] = []

    def tune(run: object, tokens: int, weights: list[torch.Tensor], split_k: int) -> object:
        calls.append((tokens, tuple(weights[0].shape), split_k))
        return [(1e-6 * tokens, BEST), (1.0, OTHER)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(tuning, "random_weights", lambda n, k, dtype: [torch.empty(n, k)])
    return calls


def test_the_best_tile_of_every_weight_is_written(
    tmp_path: Path, timed_calls: list[tuple[int, tuple[int, int], int]]
) -> None:
    path = tmp_path / "tuning.json"
    model = MODELS["small"]
    other_table = {"sm90/bfloat16/7x7": {1: OTHER}}
    tuning.save_table(other_table, path)
    times = tune_linears([model], torch.bfloat16, path)
    table = tuning.load_table.__wrapped__(path)
    for _, n, k in model.weights:
        key = tuning._table_key(n, k, torch.bfloat16, "sm90")
        assert table[key] == dict.fromkeys(tuning.BUCKETS, BEST)
        assert times[key][1] == pytest.approx(1.0) and times[key][769] == pytest.approx(2048)
    assert table["sm90/bfloat16/7x7"] == {1: OTHER}
    assert {shape for _, shape, _ in timed_calls} == {(n, k) for _, n, k in model.weights}
    assert {tokens for tokens, *_ in timed_calls} == set(tuning.TIMED)


def test_interrupted_run_keeps_its_measurements(
    tmp_path: Path, timed_calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    calls = iter(range(2))

    def weights(n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
        next(calls)
        return [torch.empty(n, k)]

    monkeypatch.setattr(tuning, "random_weights", weights)
    with pytest.raises(StopIteration):
        tune_linears([MODELS["small"]], torch.bfloat16, path)
    assert len(tuning.load_table.__wrapped__(path)) == 2 + len(tuning.load_table())


def test_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        tune_linears([MODELS["small"]], torch.bfloat16, tmp_path / "tuning.json")
