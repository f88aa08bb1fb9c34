"""Benchmark scripts import only names that exist."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_script_can_be_imported(name: str) -> None:
    import_module(f"benchmarks.{name}")
