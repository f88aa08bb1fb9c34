"""Run faults and print a table: python -m tests.mutations [options] [WORD ...]."""

import argparse
from pathlib import Path

from tests.mutations.faults import Fault
from tests.mutations.groups import GROUPS
from tests.mutations.runner import run_trials, trials_of, write_results
from tests.mutations.suite import COMMANDS, MAX_SECONDS, Result, Trial

OWN = "faults"
"""Group whose faults run on their own command: the test that they name, or the default check."""
SEVERAL = ("quick", "default", "test")
"""Commands of the other groups."""


def meant(fault: Fault, word: str) -> bool:
    """Return whether the word is the fault's area, or part of its name."""
    return word == fault.area or word in fault.name


def main() -> int:
    """Run the faults of the command line; return the number of those that were not run, or that no
    command found.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("words", nargs="*", help="areas, or parts of names; all if left out")
    parser.add_argument("--group", choices=GROUPS, default=OWN)
    parser.add_argument(
        "--commands",
        type=lambda text: tuple(text.split(",")),
        help=f"some of {','.join(COMMANDS)}. Default: {','.join(SEVERAL)}; for the group {OWN} "
        "the test that a fault names, or the default check",
    )
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--json", type=Path, help="file to write the results to, after each trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth fault from the Ith on")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, help="time limit of one trial"
    )
    args = parser.parse_args()
    commands = args.commands or (() if args.group == OWN else SEVERAL)
    if unknown := set(commands) - set(COMMANDS):
        parser.error(f"--commands {','.join(unknown)}: allowed are {', '.join(COMMANDS)}")
    first, step = map(int, args.part.split("/"))
    named = [
        f for f in GROUPS[args.group] if not args.words or any(meant(f, w) for w in args.words)
    ]
    chosen = named[first::step]
    trials = trials_of(chosen, commands)
    results: list[tuple[Trial, Result]] = []
    print("| fault | area | command | found by | s |\n|---|---|---|---|---|")
    for trial, result in run_trials(trials, args.jobs, args.seed, args.max_seconds):
        results.append((trial, result))
        print(line(trial, result), flush=True)
        if args.json is not None:
            write_results(args.json, results, args.seed)
    faults_found = {trial.fault for trial, result in results if result.case}
    ran = {trial.fault for trial, result in results if result.ran}
    for command in dict.fromkeys(trial.command for trial in trials):
        tried = [r for trial, r in results if trial.command == command and r.ran]
        print(f"{command}: {sum(bool(r.case) for r in tried)} of {len(tried)} found")
    missed = [fault.name for fault in chosen if fault in ran - faults_found]
    print(f"{len(missed)} not found by any command", *missed, sep="\n  ")
    not_run = [fault.name for fault in chosen if fault not in ran]
    print(f"{len(not_run)} not run", *not_run, sep="\n  ")
    return len(missed) + len(not_run)


def line(trial: Trial, result: Result) -> str:
    """Return a result as a line of the table."""
    assert trial.fault is not None
    missed = "NOT FOUND" if result.ran else "NOT RUN"
    by = f"{result.case}: {result.what[:90]}" if result.case else f"{missed} {result.what}"
    return (
        f"| {trial.fault.name} | {trial.fault.area} | {trial.command} | {by} "
        f"| {result.seconds:.0f} |"
    )


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
