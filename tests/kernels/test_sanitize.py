"""The sanitizer's table counts what the tool says, where it says it."""

import subprocess

import pytest

from tests.kernels import sanitize

OUTPUT = """========= COMPUTE-SANITIZER
cases of linear bfloat16
done with linear bfloat16
cases of sample float32
========= Invalid __global__ write of size 4 bytes
=========     at _sample+0x4f0
done with sample float32
cases of rms_norm float32
========= ERROR SUMMARY: 1 error
"""


def test_errors_belong_to_the_op_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, OUTPUT, "")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    found = sanitize.sanitized("memcheck", [])
    assert found["linear bfloat16"] == []
    assert found["sample float32"][0] == "Invalid __global__ write of size 4 bytes"
    assert found["rms_norm float32"] == ["no end"]
    done.returncode = 3
    assert "the tool" in sanitize.sanitized("memcheck", [])


def test_nothing_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 0, "", "not found")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: done)
    assert list(sanitize.sanitized("racecheck", [])) == ["the tool"]
