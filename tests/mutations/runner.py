"""Runner of many trials in parallel processes, each of which has a copy of the package."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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
    require_sound,
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
    """Yield each trial with its result as it ends.

    Each command and test runs in a copy without a fault as well. Raises RuntimeError if it finds
    something there.
    """
    sound = list(dict.fromkeys(trial.without_fault for trial in trials))
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        pool = ProcessPoolExecutor(jobs, context, initializer=_make_copy, initargs=(name,))
        try:
            limits = (name, seed, max_seconds)
            checks = [pool.submit(_require_sound, trial, *limits) for trial in sound]
            futures: dict[Future[Any], Trial | None] = dict.fromkeys(checks)
            futures |= {pool.submit(_run, trial, *limits): trial for trial in trials}
            for future in as_completed(futures):
                trial = futures[future]
                if trial is None:
                    future.result()
                else:
                    yield trial, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _make_copy(name: str) -> None:
    """Make the copy of this process."""
    copy_package(_folder(name))


def _folder(name: str) -> Path:
    """Return the folder of this process's copy."""
    folder = Path(name, str(os.getpid()))
    folder.mkdir(exist_ok=True)
    return folder


def _require_sound(trial: Trial, name: str, seed: int, max_seconds: float) -> None:
    if trial.gpu and not HAS_GPU:
        return
    require_sound(trial, _folder(name), seed, max_seconds)


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
