"""Runner of faults: puts a fault into a copy of the package, and runs the check there.

A fault that the bundled model does not reach names a test, which runs in the copy instead.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.faults import PACKAGE, Fault
from tests.mutations.patterns import PatternError, replaced

ROOT = Path(__file__).parents[2]
SOURCE = PACKAGE
CHECK = """
import json, sys, time
from lockstep.check import SIZES, Effort, run_check
from lockstep.config import EngineConfig
started = time.process_time()
size = SIZES[sys.argv[1]]
effort = Effort(size.scenarios, covers=size.covers, minimise=0.0, fail_fast=True)
sections = ("sampling", "tokens", "cache", "capture")
report = run_check(sys.argv[1], seed=int(sys.argv[2]), effort=effort, sections=sections)
result = report.to_json()
result["spent"] = time.process_time() - started
print(json.dumps(result))
"""
WITHOUT_NUMBA = "import sys\nsys.modules['numba'] = sys.modules['llvmlite'] = None\n"
"""Code of a sitecustomize.py, which every process of a copy runs: its ops are torch's then."""
MAX_SECONDS = 900
"""Time limit of a check that has found nothing, on a busy machine."""
TESTS_FAILED = 1
"""Exit status of pytest if a test failed. Higher ones mean that tests did not run."""


@dataclass(frozen=True)
class Result:
    """Result of a check or test of a fault.

    case: the first case that differed, "" if none. seconds: CPU time until then, without the start
    of the process for a check.
    """

    fault: Fault
    case: str
    what: str
    seconds: float


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Copy the package and its tests to a folder for the context; the bundled model is linked."""
    package = folder / "lockstep"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("assets"))
    (package / "assets").symlink_to(SOURCE / "assets")
    shutil.copytree(ROOT / "tests", folder / "tests")
    shutil.copy2(ROOT / "pyproject.toml", folder)
    try:
        yield folder
    finally:
        shutil.rmtree(package)
        shutil.rmtree(folder / "tests")


def mutated(text: str, fault: Fault) -> str:
    """Return the file with the fault. Raises PatternError where its pattern does not match once."""
    try:
        return replaced(text, fault.scope, fault.old, fault.new)
    except PatternError as error:
        raise PatternError(
            f"the fault {fault.name!r} does not apply to {fault.file}: {error}\n"
            "State the fault in tests/mutations/faults.py for the code that is there now."
        ) from None


def try_fault(fault: Fault, folder: Path, size: str = "default", seed: int = 0) -> Result:
    """Run the check of a size, or the fault's test, with the fault in the copy; then restore the
    file."""
    path = folder / "lockstep" / fault.file
    original = (SOURCE / fault.file).read_text(encoding="utf-8")
    path.write_text(mutated(original, fault), encoding="utf-8")
    if not fault.numba:
        (folder / "sitecustomize.py").write_text(WITHOUT_NUMBA, encoding="utf-8")
    try:
        if fault.test:
            return _tested(fault, folder)
        report = _run(folder, size, seed)
    finally:
        shutil.copy2(SOURCE / fault.file, path)
        (folder / "sitecustomize.py").unlink(missing_ok=True)
    if "failures" not in report:
        return Result(fault, report["case"], report["what"], 0.0)
    if not report["failures"]:
        return Result(fault, "", "", report["spent"])
    first = report["failures"][0]
    return Result(fault, _case(first), first["what"], report["spent"])


def _tested(fault: Fault, folder: Path) -> Result:
    """Return the result of the fault's test. Raises RuntimeError if it does not run."""
    command = ["-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-m", "not gpu"]
    spent = _spent()
    try:
        done = _python(folder, *command, fault.test)
    except subprocess.TimeoutExpired:
        return Result(fault, "", f"no end after {MAX_SECONDS} s", 0.0)
    spent = _spent() - spent
    if done.returncode == 0:
        return Result(fault, "", "", spent)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != TESTS_FAILED or not failed:
        raise RuntimeError(f"{fault.test} was not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    case, _, what = failed[0].removeprefix("FAILED ").partition(" - ")
    return Result(fault, case, what, spent)


def _spent() -> float:
    """Return the CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _case(failure: dict) -> str:
    """Return the name of a failed case of the check."""
    setup = failure["setup"]
    if setup["phase"] == "scenario":
        return failure["batch"]
    if setup["phase"] == "sampling":
        return f"distribution: {failure['batch']}"
    drafting = f"{setup['drafter']} K={setup['k']}"
    return f"matrix: {drafting}, {setup['phase']}, {failure['batch']}, {failure['request']}"


def require_sound(folder: Path, seed: int = 0) -> None:
    """Raise RuntimeError if the copy without a fault fails the quick check.

    A check that cannot run would seem to find every fault.
    """
    report = _run(folder, "quick", seed)
    if report.get("failures") != []:
        raise RuntimeError(f"the check of the copy without a fault is not clean: {report}")


def _run(folder: Path, size: str, seed: int) -> dict:
    """Return the report of a check in a separate process, or how the process ended without one."""
    try:
        done = _python(folder, "-c", CHECK, size, str(seed))
    except subprocess.TimeoutExpired:
        return {"case": "", "what": f"no end after {MAX_SECONDS} s"}
    if done.returncode:
        return {"case": "the check itself", "what": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy until it ends. Raises RuntimeError if a signal ended it."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=MAX_SECONDS,
        env={**os.environ, **settings},
    )
    if done.returncode < 0:
        raise RuntimeError(f"the check was killed by signal {-done.returncode}; run it again")
    return done
