"""Benchmark scripts import only names that exist."""

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.step import added_us

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_script_can_be_imported(name: str) -> None:
    import_module(f"benchmarks.{name}")


def test_a_kernel_counts_after_the_end_of_all_earlier_ones() -> None:
    spans = [("norm", 0.0, 2.0), ("product", 1.0, 5.0), ("norm", 6.0, 8.0), ("product", 6.5, 7.0)]
    assert added_us(spans) == {"norm": (2, 3.0), "product": (2, 3.5)}
