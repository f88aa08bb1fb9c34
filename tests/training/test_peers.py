"""Two processes train as one: they go by one clock, and their gradients are averaged."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import pathlib
import sys
import torch
from training.peers import Peers
peers = Peers()
weights = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))]
for i, p in enumerate(weights):
    p.grad = torch.full_like(p, float(10 * i + peers.rank))
peers.average(weights)
told = peers.agree(100.0 + peers.rank)
text = f"{told} {weights[0].grad.tolist()} {weights[1].grad.tolist()}"
pathlib.Path(sys.argv[1], str(peers.rank)).write_text(text)
"""


def test_two_processes_average_and_agree(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(program), str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    both = f"100.0 {[[0.5, 0.5]] * 3} {[10.5] * 5}"
    assert [(tmp_path / rank).read_text() for rank in "01"] == [both, both]


def test_one_process_alone_needs_no_other() -> None:
    from training.peers import Peers

    peers = Peers()
    assert peers.first and peers.agree(0.25) == 0.25
