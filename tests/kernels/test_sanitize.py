"""The sanitizer's table: reports are assigned to jobs, false positives are listed, time is
limited."""

import re
import sys
import time
from pathlib import Path

import pytest

import lockstep.kernels
from tests.kernels import sanitize
from tests.kernels.sanitize import ALLOWED, DONE, Job, problems, reports

JOB = Job("racecheck", "linear", "quantized", "bfloat16")
RACE = """========= COMPUTE-SANITIZER
case 1
========= Error: Race reported between Read access at {kernel}+0x130 in {file}:{read}
=========     and Write access at {kernel}+0xca0 in {file}:{write} [5 hazards]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in packed.py:75
=========
done with all cases
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def file_of(kernel: str) -> Path:
    """Return the file that defines a kernel."""
    root = Path(lockstep.kernels.__path__[0])
    return next(p for p in root.rglob("*.py") if f"\ndef {kernel}(" in p.read_text())


def race(kernel: str, read: str, write: str) -> str:
    """Return racecheck's output for accesses in the lines with these prefixes."""
    path = file_of(kernel)
    lines = [line.strip() for line in path.read_text().splitlines()]

    def number(begin: str) -> int:
        return next(i for i, line in enumerate(lines, 1) if line.startswith(begin))

    return RACE.format(kernel=kernel, file=path.name, read=number(read), write=number(write))


def test_report_has_both_accesses_without_host_frames() -> None:
    output = race("pipeline_kernel", "stage = 0", "phase = 0")
    (report,) = problems(output)
    assert re.search(r"Read access at pipeline_kernel\+0x130 in quantized_pipeline.py:\d+", report)
    assert re.search(
        r"and Write access at pipeline_kernel\+0xca0 in quantized_pipeline.py:\d+", report
    )
    assert "Host Frame" not in report


def test_allowed_false_positives_are_counted() -> None:
    output = race("pipeline_kernel", "def pipeline_kernel(", "gl.warp_specialize(")
    assert problems(output) == []
    assert sanitize.row(JOB, output, 3.0).endswith("1 cases    3 s  clean, 1 allowed")


@pytest.mark.parametrize(
    ("kernel", "read", "write"),
    [
        ("pipeline_kernel", "def pipeline_kernel(", "fence_async_shared()  # reads"),
        ("pipeline_kernel", "stage = 0", "gl.warp_specialize("),
        ("pipeline_kernel", "gl.warp_specialize(", "gl.warp_specialize("),
        ("up_pipeline_kernel", "def up_pipeline_kernel(", "gl.warp_specialize("),
        ("_latent_kernel", "rescale = rescales.index(", "factors.index(0).store("),
        ("_split_kv_kernel", "rescale = rescales.index(", "row_maxes.index("),
    ],
)
def test_races_similar_to_false_positives_fail(kernel: str, read: str, write: str) -> None:
    assert len(problems(race(kernel, read, write))) == 1


def test_write_write_hazard_fails() -> None:
    output = race("pipeline_kernel", "def pipeline_kernel(", "gl.warp_specialize(")
    assert len(problems(output.replace("Read access", "Write access"))) == 1


def test_access_without_source_line_fails() -> None:
    output = race("pipeline_kernel", "def pipeline_kernel(", "gl.warp_specialize(")
    assert len(problems(re.sub(r" in quantized_pipeline.py:\d+ \[", " [", output))) == 1


def test_memcheck_errors_and_tool_warnings_fail() -> None:
    output = f"""========= Invalid __global__ write of size 4 bytes
=========     at _sample+0x4f0
{DONE}
========= ERROR SUMMARY: 1 error
"""
    assert problems(output) == ["Invalid __global__ write of size 4 bytes\n      at _sample+0x4f0"]
    overflow = "========= Warning: Detected overflow of tracked cuda::barrier structures.\n"
    assert problems(overflow + DONE) == [overflow[10:-1]]


def test_unfinished_job_fails() -> None:
    (problem,) = problems("========= COMPUTE-SANITIZER\ncase 1\n")
    assert problem.startswith("did not finish")
    assert reports("========= COMPUTE-SANITIZER\n") == []


def test_job_is_killed_at_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!/bin/sh\necho case 1\nexec {sys.executable} -c 'import time; time.sleep(60)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: str(tool))
    began = time.monotonic()
    output, _ = sanitize.run_job(JOB, began)
    assert time.monotonic() - began < 10
    assert problems(output)


def test_allowed_races_name_existing_lines() -> None:
    """A rule whose line was reworded would allow nothing, and one without a kernel is stale."""
    for rule in ALLOWED:
        assert rule.reason
        texts = {kernel: file_of(kernel).read_text() for kernel in rule.kernels}
        for begin in (rule.read, *rule.writes):
            assert any(
                any(line.strip().startswith(begin.format(kernel)) for line in text.splitlines())
                for kernel, text in texts.items()
            ), begin
