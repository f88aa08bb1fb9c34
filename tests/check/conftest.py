"""Fixtures: a tiny model, and a check that is small enough to run in a test."""

from pathlib import Path

import pytest

from lockstep.check.matrix import cases, setups
from tests.tiny_model import TWO_LAYERS, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS)
    return str(folder)


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(setups.SIZES, "quick", setups.Size(max_tokens=8, alone=8, companions=4))
    monkeypatch.setattr(cases, "LONG_PROMPT", 300)
