"""The table of packed weights' tiles: what is timed is written, what has other bits is not."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench import tune_packed as tuner
from lockstep.bench.dimensions import MODELS
from lockstep.errors import ConfigError
from lockstep.kernels.linear import packed_tuning, tuning
from lockstep.kernels.linear.packed_tuning import BUCKETS, PackedTile
from lockstep.kernels.packed.bench import LAYOUTS

BEST = PackedTile(16, 64, 128, registers=96)
OTHER = PackedTile(64, 64, 128)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is none, and a single process."""

    def tune(run: Any, right: Any, tokens: int, *rest: Any) -> Any:
        return [(1e-6 * tokens, BEST), (1.0, OTHER)], {OTHER: "other bits"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(packed_tuning, "tune", tune)
    monkeypatch.setattr(packed_tuning, "some_weights", lambda empty: [empty()])
    monkeypatch.setattr(tuner, "_compile", lambda pool, layout, shapes: None)
    on_cpu = {
        name: partial(lambda empty, n, k, device: empty(n, k, "cpu"), empty)
        for name, empty in LAYOUTS.items()
    }
    monkeypatch.setattr(tuner, "LAYOUTS", on_cpu)


def test_the_best_tile_of_every_layout_is_written(tmp_path: Path, pretended: None) -> None:
    path = tmp_path / "tuning.json"
    kept = {"sm90/bfloat16/nvfp4/7x7": {1: OTHER}}
    tuning.save(kept, path)
    model = MODELS["small"]
    times, refused = tuner.tune_packed([model], torch.bfloat16, path)
    found = packed_tuning.load.__wrapped__(path)
    assert found["sm90/bfloat16/nvfp4/7x7"] == {1: OTHER}
    shapes = {(n, k) for _, n, k in model.weights[:-1]}
    assert len(found) == 1 + len(tuner.TUNED) * len(shapes)
    for layout in tuner.TUNED:
        for n, k in shapes:
            key = packed_tuning.key(LAYOUTS[layout](n, k, "cpu"), torch.bfloat16, 90)
            assert found[key] == dict.fromkeys(BUCKETS, BEST)
            assert times[key][129][0] == (pytest.approx(256), str(BEST))
    assert any("other bits" in line for line in refused)


def test_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        tuner.tune_packed([MODELS["small"]], torch.bfloat16, tmp_path / "tuning.json")
