"""Tests of a run with two processes: one clock, and averaged gradients."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import pathlib
import sys
import torch
from training.process_group import ProcessGroup
child = os.fork()
os.environ["RANK"] = "0" if child else "1"
peers = ProcessGroup()
weights = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))]
for i, p in enumerate(weights):
    p.grad = torch.full_like(p, float(10 * i + peers.rank))
peers.average(weights)
told = peers.agree(100.0 + peers.rank)
text = f"{told} {weights[0].grad.tolist()} {weights[1].grad.tolist()}"
pathlib.Path(sys.argv[1], str(peers.rank)).write_text(text)
peers.wait()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Two processes for one import of torch, with torchrun's settings."""


@pytest.mark.slow
def test_two_processes_average_and_agree(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    peers = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, **peers, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    both = f"100.0 {[[0.5, 0.5]] * 3} {[10.5] * 5}"
    assert [(tmp_path / rank).read_text() for rank in "01"] == [both, both]


def test_one_process_alone_needs_no_other() -> None:
    from training.process_group import ProcessGroup

    peers = ProcessGroup()
    assert peers.first and peers.agree(0.25) == 0.25
