"""Kernels compile for a GPU: all that ops launch; the stepping law's with widths that differ."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels.backends import OPS


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_stepping_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own: in this one the interpreter may have taken the kernels' place."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compiles"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 12


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_what_every_op_launches_compiles_for_hopper(tmp_path: Path) -> None:
    """Every op with a Triton backend, by its first case."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compile_launches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [op.name for op in OPS]


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_packed_weights_reach_the_matrix_units_in_their_own_order(tmp_path: Path) -> None:
    """On Hopper and Ampere: kWidth 2, and on Hopper no second way through shared memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compile_packed"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 7
