"""Effects of importing the package: OpenMP threads wait without spinning."""

import os
import subprocess
import sys
from pathlib import Path

import lockstep

ROOT = Path(__file__).parent.parent
LOADED = """
import ctypes, importlib.util, pathlib, sys
import lockstep
assert "torch" not in sys.modules
torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
found = [*torch.glob("lib/libgomp*"), *torch.parent.glob("torch.libs/libgomp*")]
ctypes.CDLL(str(found[0]))
"""
"""Without torch itself, which is slow to import."""


def run(code: str, **settings: str) -> str:
    """Return the output on both streams of code in a new interpreter with only these OMP
    settings."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | settings
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_lazy_names_are_listed() -> None:
    assert {*lockstep.__all__, "__file__"} <= {*dir(lockstep)}


def test_waiting_threads_do_not_spin() -> None:
    """Reported by torch's libgomp when it is loaded."""
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run(LOADED, OMP_DISPLAY_ENV="true")


def test_user_setting_is_kept() -> None:
    code = "import lockstep, os; print(os.environ['OMP_WAIT_POLICY'])"
    assert run(code, OMP_WAIT_POLICY="active") == "active\n"
