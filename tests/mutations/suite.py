"""Trials of faults: a command runs in a copy of the package that has one fault.

A command is a check of a size, the doctor, or the test that the fault names.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutations.faults import PACKAGE, Fault
from tests.mutations.patterns import PatternError, replaced

ROOT = Path(__file__).parents[2]
SOURCE = PACKAGE
CHECKS = ("quick", "default", "full")
DOCTOR = "doctor"
TEST = "test"
COMMANDS = (*CHECKS, DOCTOR, TEST)
"""Names of the commands that can find a fault: sizes of `lockstep check`, `lockstep doctor`, and
the test that the fault names."""
CHECK = """
import json, sys, time
from lockstep.check import SIZES, Effort, run_check
from lockstep.config import EngineConfig
started = time.process_time()
effort = Effort.of(SIZES[sys.argv[1]], minimise=0.0, fail_fast=True)
sections = ("sampling", "tokens", "cache", "capture")
report = run_check(sys.argv[1], seed=int(sys.argv[2]), effort=effort, sections=sections)
result = report.to_json()
result["spent"] = time.process_time() - started
print(json.dumps(result))
"""
WITHOUT_NUMBA = "import sys\nsys.modules['numba'] = sys.modules['llvmlite'] = None\n"
"""Code of a sitecustomize.py, which every process of a copy runs: its ops are torch's then."""
MAX_SECONDS = 900
"""Time limit of a command that has found nothing, on a busy machine."""
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
"""Signals that end a process for want of memory or time, not by a fault."""
TESTS_FAILED = 1
"""Exit status of pytest if a test failed. Higher ones mean that tests did not run."""


@dataclass(frozen=True)
class Trial:
    """Run of one command in a copy with one fault, or without one (fault None).

    command: one of COMMANDS. test: test of the command TEST. gpu: whether the command sees GPUs.
    numba: whether ops run in Numba kernels where they can; most faults are in torch's ops.
    """

    fault: Fault | None
    command: str
    test: str = ""
    gpu: bool = False
    numba: bool = False

    @property
    def without_fault(self) -> "Trial":
        """Return the trial of the same command in a copy without a fault."""
        return replace(self, fault=None)


@dataclass(frozen=True)
class Result:
    """Result of a trial.

    case: the first case that differed, "" if none. seconds: CPU time until then, without the start
    of the process for a check. ran: False where the command did not run, for the reason in `what`.
    """

    case: str
    what: str
    seconds: float
    ran: bool = True


@dataclass(frozen=True)
class Copy:
    """Copy of the package in a folder, and how commands run there.

    gpu: whether they see GPUs. max_seconds: time limit of a command.
    """

    folder: Path
    gpu: bool
    max_seconds: float


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Copy the package and its tests to a folder for the context; the bundled model is linked."""
    copy_package(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder / "lockstep")
        shutil.rmtree(folder / "tests")


def copy_package(folder: Path) -> None:
    """Copy the package and its tests to a folder; the bundled model is linked."""
    package = folder / "lockstep"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("assets"))
    (package / "assets").symlink_to(SOURCE / "assets")
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy2(ROOT / "pyproject.toml", folder)


def mutated(text: str, fault: Fault) -> str:
    """Return the file with the fault. Raises PatternError where its pattern does not match once."""
    try:
        return replaced(text, fault.scope, fault.old, fault.new)
    except PatternError as error:
        raise PatternError(
            f"the fault {fault.name!r} does not apply to {fault.file}: {error}\n"
            "State the fault in tests/mutations for the code that is there now."
        ) from None


@contextmanager
def put_in(fault: Fault, folder: Path) -> Iterator[None]:
    """Put a fault into the copy for the context."""
    path = folder / "lockstep" / fault.file
    original = (SOURCE / fault.file).read_text(encoding="utf-8")
    path.write_text(mutated(original, fault), encoding="utf-8")
    try:
        yield
    finally:
        shutil.copy2(SOURCE / fault.file, path)


def own_trial(fault: Fault, size: str = "default") -> Trial:
    """Return the trial that must find a fault: of the test that it names, or the check."""
    return trial_of(fault, TEST if fault.test else size)


def trial_of(fault: Fault, command: str) -> Trial:
    """Return the trial of a command."""
    test = fault.test if command == TEST else ""
    return Trial(fault, command, test, fault.gpu, fault.numba)


def run_trial(
    trial: Trial, folder: Path, seed: int = 0, max_seconds: float = MAX_SECONDS
) -> Result:
    """Run a trial in a copy, which has no fault afterwards.

    Raises RuntimeError if the command did not run.
    """
    (folder / "sitecustomize.py").write_text("" if trial.numba else WITHOUT_NUMBA, encoding="utf-8")
    with nullcontext() if trial.fault is None else put_in(trial.fault, folder):
        copy = Copy(folder, trial.gpu, max_seconds)
        started = _spent()
        try:
            if trial.command == TEST:
                case, what = _tested(copy, trial.test)
            elif trial.command == DOCTOR:
                case, what = _examined(copy)
            else:
                return _checked(copy, trial.command, seed)
        except subprocess.TimeoutExpired:
            case = ""
            what = f"no end after {max_seconds:g} s"
        return Result(case, what, _spent() - started)


def require_sound(
    trial: Trial, folder: Path, seed: int = 0, max_seconds: float = MAX_SECONDS
) -> None:
    """Raise RuntimeError if the trial's command finds something in the copy without a fault.

    A command that cannot run would seem to find every fault.
    """
    result = run_trial(trial.without_fault, folder, seed, max_seconds)
    if result.case or result.what:
        raise RuntimeError(
            f"{trial.test or trial.command} is not clean in the copy without a fault: "
            f"{result.case}: {result.what}"
        )


def _checked(copy: Copy, size: str, seed: int) -> Result:
    """Return the result of a check, whose CPU time excludes the start of its process."""
    started = _spent()
    done = _python(copy, "-c", CHECK, size, str(seed))
    if done.returncode:
        return Result("the check itself", _end(done), _spent() - started)
    report = json.loads(done.stdout.splitlines()[-1])
    if not report["failures"]:
        return Result("", "", report["spent"])
    first = report["failures"][0]
    return Result(_case(first), first["what"], report["spent"])


def _case(failure: dict) -> str:
    """Return the name of a failed case of the check."""
    setup = failure["setup"]
    if setup["phase"] == "scenario":
        return failure["batch"]
    if setup["phase"] == "sampling":
        return f"distribution: {failure['batch']}"
    drafting = f"{setup['drafter']} K={setup['k']}"
    return f"matrix: {drafting}, {setup['phase']}, {failure['batch']}, {failure['request']}"


def _examined(copy: Copy) -> tuple[str, str]:
    """Return the first finding of the doctor about a kernel, two empty texts if none.

    Faults of the machine are not findings.
    """
    done = _python(copy, "-m", "lockstep", "doctor", "--no-save", "--json")
    try:
        examined = json.loads(done.stdout)["kernels"]["examined"]
    except ValueError:
        return "the doctor itself", _end(done)
    for finding in (finding for entry in examined for finding in entry["findings"]):
        return f"{finding['op']}, {finding['backend']}: {finding['check']}", finding["detail"]
    return "", ""


def _tested(copy: Copy, test: str) -> tuple[str, str]:
    """Return a failed test and its error, two empty texts if none failed.

    Raises RuntimeError if the test did not run.
    """
    command = ["-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    marks = "gpu or not gpu" if copy.gpu else "not gpu"
    done = _python(copy, *command, "-m", marks, test)
    if done.returncode == 0:
        return "", ""
    if done.returncode < 0:
        return test, _end(done)
    # An ERROR is a fixture that raises: most of them build an engine.
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode != TESTS_FAILED or not failed:
        raise RuntimeError(f"{test} was not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    case, _, what = failed[0].partition(" ")[2].partition(" - ")
    return case, what


def _end(done: subprocess.CompletedProcess[str]) -> str:
    """Return how a process ended that failed: by a signal, or its last line."""
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    return done.stderr.strip().splitlines()[-1]


def _spent() -> float:
    """Return the CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _python(copy: Copy, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy until it ends.

    Raises RuntimeError if another process killed it, and subprocess.TimeoutExpired.
    """
    path = os.pathsep.join(filter(None, [str(copy.folder), os.environ.get("PYTHONPATH")]))
    settings = {
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if not copy.gpu:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=copy.folder,
        timeout=copy.max_seconds,
        env={**os.environ, **settings},
    )
    if -done.returncode in FROM_OUTSIDE:
        raise RuntimeError(f"the command was killed by signal {-done.returncode}; run it again")
    return done
