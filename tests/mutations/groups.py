"""Groups of faults: every module of this folder that defines FAULTS is one, by its name."""

from importlib import import_module
from pathlib import Path

from tests.mutations.faults import Fault

FOLDER = Path(__file__).parent
TOOLS = {"groups", "patterns", "runner", "suite"}
"""Modules that put faults in and run commands."""
GROUPS: dict[str, tuple[Fault, ...]] = {
    path.stem: import_module(f"tests.mutations.{path.stem}").FAULTS
    for path in sorted(FOLDER.glob("*.py"))
    if path.stem not in TOOLS and not path.stem.startswith(("_", "test_"))
}
"""Faults by group. `faults` has those whose command is known; the others are tried on several."""
ALL = tuple(fault for faults in GROUPS.values() for fault in faults)
