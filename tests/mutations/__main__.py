"""Run faults and print a table: python -m tests.mutations [--size SIZE] [--seed N] [WORD ...]."""

import argparse
import tempfile
from pathlib import Path

from tests.mutations.faults import FAULTS, Fault
from tests.mutations.suite import copied, require_sound, try_fault


def meant(fault: Fault, word: str) -> bool:
    """Return whether the word is the fault's area, or part of its name."""
    return word == fault.area or word in fault.name


def main() -> int:
    """Run the faults of the command line; return the number that were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("words", nargs="*", help="areas, or parts of names; all if left out")
    parser.add_argument("--size", default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth fault from the Ith on")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    chosen = [f for f in FAULTS if not args.words or any(meant(f, w) for w in args.words)]
    missed = 0
    print("| fault | area | found by | s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, copied(Path(name)) as folder:
        require_sound(folder, args.seed)
        for fault in chosen[first::step]:
            result = try_fault(fault, folder, args.size, args.seed)
            missed += not result.case
            by = f"{result.case}: {result.what[:90]}" if result.case else f"NOT FOUND {result.what}"
            print(f"| {fault.name} | {fault.area} | {by} | {result.seconds:.0f} |", flush=True)
    print(f"{missed} not found")
    return missed


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
