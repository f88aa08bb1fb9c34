"""What importing the package does to the process: OpenMP's threads wait without spinning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("chosen", "expected"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_threads_that_wait_give_their_core_away_unless_the_user_chose(
    chosen: str | None, expected: str
) -> None:
    """As libgomp itself says when torch loads it."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    code = "import lockstep, sys; assert 'torch' not in sys.modules; import torch"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr
