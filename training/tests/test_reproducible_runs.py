"""Tests of runs by steps: they give the same data and the same weights."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from training import train
from training.batches import Feed

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "training.train", "--smoke", "--steps", "3", "--batch", "2048", "--model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundled tokenizer."""
    prepared = tmp_path_factory.mktemp("data")
    train._prepare(prepared, argparse.Namespace(tokenizer=False, resume=False))
    return prepared


def batches(folder: Path, seed: int, wait: float) -> list[np.ndarray]:
    """The first ones of two workers, command for every `wait` seconds."""
    feed = Feed(folder, {64: 2}, 256, seed, {"json": 1.0}, keep=4, patient=True)
    arrays = []
    for _ in range(4):
        arrays.extend(feed.batch(64, 2))
        time.sleep(wait)
    return arrays


def test_batches_of_a_patient_feed_depend_on_the_seed_alone(folder: Path) -> None:
    first = batches(folder, 1, 0.0)
    again = batches(folder, 1, 0.03)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], first[2])


def trained(name: str, folder: Path, salt: str) -> dict[str, bytes]:
    """The weights that a run of three steps leaves. salt: of Python's own hashes."""
    known = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *COMMAND, name, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=900, env=known, cwd=ROOT)
    paths = folder.rglob("*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v3", "qwen3"])
def test_the_same_command_gives_the_same_weights(name: str, tmp_path: Path) -> None:
    first = trained(name, tmp_path / "first", "1")
    assert first == trained(name, tmp_path / "again", "2")
    assert first
