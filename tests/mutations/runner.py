"""Runner of many trials in parallel processes, each of which has a copy of the package."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.mutations.faults import Fault
from tests.mutations.groups import GROUPS
from tests.mutations.suite import (
    TEST,
    Result,
    Trial,
    copy_package,
    own_trial,
    run_trial,
    trial_of,
)

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))


def trials_of(faults: Sequence[Fault], commands: Sequence[str]) -> list[Trial]:
    """Return the trials of each command, longest commands first; without commands each fault's own.

    A fault that names no test has no trial of the command TEST.
    """
    if not commands:
        return [own_trial(fault) for fault in faults]
    # A check that finds nothing takes minutes, so it must not be the last to start.
    ordered = sorted(commands, key=lambda command: command != "default")
    return [
        trial_of(fault, command)
        for command in ordered
        for fault in faults
        if fault.test or command != TEST
    ]


def run_trials(
    trials: Sequence[Trial], jobs: int, seed: int, max_seconds: float
) -> Iterator[tuple[Trial, Result]]:
    """Yield each trial with its result, once it and the same command without a fault have ended.

    A command that finds something without a fault counts as not run.
    """
    waiting = dict[Trial, list[tuple[Trial, Result]]]()
    sound = dict.fromkeys(trial.without_fault for trial in trials)
    results_without_fault = dict[Trial, Result]()
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        pool = ProcessPoolExecutor(jobs, context, initializer=_make_copy, initargs=(name,))
        try:
            futures = {
                pool.submit(_run, trial, name, seed, max_seconds): trial
                for trial in (*sound, *trials)
            }
            for future in as_completed(futures):
                trial, result = futures[future], future.result()
                if trial.fault is None:
                    results_without_fault[trial] = result
                else:
                    waiting.setdefault(trial.without_fault, []).append((trial, result))
                if trial.without_fault in results_without_fault:
                    without = results_without_fault[trial.without_fault]
                    for ended, ended_result in waiting.pop(trial.without_fault, []):
                        yield ended, judged(ended_result, without)
        finally:
            pool.shutdown(cancel_futures=True)


def judged(result: Result, without_fault: Result) -> Result:
    """Return a result, or why it does not count."""
    if not without_fault.case and not without_fault.what:
        return result
    what = f"without a fault: {without_fault.case} {without_fault.what}"
    return Result("", what, result.seconds, ran=False)


def _make_copy(name: str) -> None:
    """Make the copy of this process."""
    copy_package(_folder(name))


def _folder(name: str) -> Path:
    """Return the folder of this process's copy."""
    folder = Path(name, str(os.getpid()))
    folder.mkdir(exist_ok=True)
    return folder


def _run(trial: Trial, name: str, seed: int, max_seconds: float) -> Result:
    """Return the result of a trial, also where its command does not run."""
    if trial.gpu and not HAS_GPU:
        return Result("", "it needs a GPU", 0.0, ran=False)
    try:
        return run_trial(trial, _folder(name), seed, max_seconds)
    except RuntimeError as error:
        return Result("", str(error), 0.0, ran=False)


def to_json(results: Iterable[tuple[Trial, Result]], seed: int) -> dict[str, Any]:
    """Return results as plain data: each fault with what each command found."""
    group_of = {fault.name: group for group, faults in GROUPS.items() for fault in faults}
    entries = dict[str, dict[str, Any]]()
    for trial, result in results:
        assert trial.fault is not None
        fault = {name: getattr(trial.fault, name) for name in ("name", "area", "test", "breaks")}
        new = {"group": group_of[trial.fault.name], **fault, "commands": {}}
        entry = entries.setdefault(trial.fault.name, new)
        entry["commands"][trial.command] = asdict(result)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": version("torch"),
        "seed": seed,
        "faults": list(entries.values()),
    }


def write_results(path: Path, results: Iterable[tuple[Trial, Result]], seed: int) -> None:
    """Write results to a file of JSON."""
    path.write_text(json.dumps(to_json(results, seed), indent=1) + "\n", encoding="utf-8")
