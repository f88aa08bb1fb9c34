"""The first SIGTERM interrupts a command, later ones are ignored; Ctrl-C ends it in one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked_processes import ForkedProgram
from tests.serve.server_process import COMMAND, PATIENCE, engine_of, is_gone

PROGRAM = """
import ctypes, os, signal
from lockstep.cli.interrupt import sigterm_interrupts
from lockstep.kernels.compiler_signals import run_empty_pass

def handler(number):
    \"\"\"The address of what the kernel calls for a signal.\"\"\"
    libc = ctypes.CDLL(None)
    found = (ctypes.c_void_p * 64)()
    assert libc.sigaction(number, None, found) == 0
    return found[0]

python = handler(signal.SIGINT)
with sigterm_interrupts():
    run_empty_pass()
    assert handler(signal.SIGTERM) == handler(signal.SIGINT) == python
    try:
        os.kill(os.getpid(), SENT)
    except KeyboardInterrupt:
        os.kill(os.getpid(), SENT if SENT == signal.SIGTERM else 0)
        print("reported", flush=True)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.default_cases("15")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_compiler_does_not_replace_signal_handlers(sent: signal.Signals) -> None:
    """LLVM replaces signal handlers at a process's first pass; they must be restored."""
    # With LLVM's handlers, a second SIGTERM, as `timeout` sends it, ended 61 of 150 such programs
    # on one machine before they reported.
    pytest.importorskip("triton")
    program = PROGRAM.replace("SENT", str(int(sent)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "reported\n"), done.stderr


INTERRUPTED = (130, -signal.SIGINT)
"""Statuses of a command that Ctrl-C ended: shells show 130 for both."""
LOADING = """
import os, signal, sys, time
import lockstep.llm
from lockstep.__main__ import main

class Interrupted:
    \"\"\"A model that Ctrl-C ends while it loads, and once more while that is cleaned up.\"\"\"

    def __init__(self, progress=None, **settings):
        if progress is not None:
            progress("loading", 1, 2)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        finally:
            if TWICE:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)

    @classmethod
    def over(cls, engine):
        return cls()

lockstep.llm.LLM = Interrupted
sys.argv = ["lockstep", *ARGUMENTS]
main()
"""


def run_program(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("arguments", "twice"),
    [
        (["generate", "-p", "a"], True),
        *(
            pytest.param(arguments, twice, marks=pytest.mark.slow)
            for arguments in (
                ["generate", "-p", "a"],
                ["chat"],
                ["bench"],
                ["check", "--quick"],
                ["serve", "--disable-frontend-multiprocessing", "--port", "0"],
            )
            for twice in (False, True)
        ),
    ],
)
def test_ctrl_c_while_a_model_loads(arguments: list[str], twice: bool) -> None:
    program = LOADING.replace("ARGUMENTS", repr(arguments)).replace("TWICE", str(twice))
    running = ForkedProgram(program, [])
    try:
        stdout, stderr = running.communicate(PATIENCE)
    finally:
        running.kill()
    assert running.returncode in INTERRUPTED, stderr
    assert "Traceback" not in stderr
    if arguments[0] == "check":  # it reports what was compared
        assert "Stopped early" in stdout + stderr
        return
    (line,) = [one for one in stderr.splitlines() if one.startswith("Interrupted")]
    assert line.startswith(f"Interrupted: lockstep {arguments[0]}")
    assert line.endswith(", while loading.")


@pytest.mark.parametrize("cause", ["KeyboardInterrupt", "ImportError"])
def test_ctrl_c_while_modules_are_imported(cause: str) -> None:
    """The command ends with one line, also where a module converts the interrupt."""
    hook = f"""
import os, sys, signal
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "MODULE":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.sigtimedwait([signal.SIGUSR1], 60)
            except KeyboardInterrupt:
                raise {cause}

sys.meta_path.insert(0, Interrupting())
from lockstep.__main__ import main
sys.argv = ["lockstep", "explain"]
main()
"""
    inside = "lockstep.models" if cause == "ImportError" else "lockstep.cli"
    done = run_program(hook.replace("MODULE", inside))
    assert done.returncode in INTERRUPTED, done.stderr
    assert done.stderr.startswith("Interrupted: lockstep"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("pauses", [[0.0], [1.0, 0.2], [3.0, 0.0, 0.5]])
def test_ctrl_c_while_a_server_starts_leaves_no_process(
    tmp_path: Path, pauses: list[float]
) -> None:
    """A terminal sends SIGINT to the command and to its engine process."""
    running = subprocess.Popen(
        [*COMMAND, "--uds", str(tmp_path / "socket")],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    engine = None
    while engine is None and time.monotonic() < deadline:
        time.sleep(0.02)
        try:
            engine = engine_of(running)
        except ValueError:  # it has not been started
            assert running.poll() is None
    assert engine is not None
    for pause in pauses:
        time.sleep(pause)
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=PATIENCE)
    assert running.returncode in INTERRUPTED and "Traceback" not in stderr, stderr
    assert "Interrupted: lockstep serve, while " in stderr
    while not is_gone(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(engine)
