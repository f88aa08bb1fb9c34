"""The server as a process on a Unix socket."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.forked_processes import ForkedProgram, engine_of_program

PATIENCE = 90.0
"""Time limit in seconds of a server's start or answer."""
COMMAND = [sys.executable, "-m", "lockstep", "serve"]


@contextlib.contextmanager
def served(
    path: Path, *options: str, code: str | None = None, log: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str] | ForkedProgram, httpx.Client]]:
    """Yield (the process, a client of it) once it answers, in its own process group; end it
    afterwards.

    path: of the socket; options: of the command; code: Python code to run instead of `-m lockstep`,
    in a forked process unless there is a log. log: file for stderr, for tests whose output would
    fill the pipe of `running.stderr`.
    """
    options = ("--uds", str(path), *options)
    running: subprocess.Popen[str] | ForkedProgram
    if code and log is None:
        running = ForkedProgram(code, [*COMMAND[3:], *options])
    else:
        command = [sys.executable, "-c", code, *COMMAND[3:]] if code else COMMAND
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as stderr:
            running = subprocess.Popen(
                [*command, *options], stderr=stderr, text=True, start_new_session=True
            )
    transport = httpx.HTTPTransport(uds=str(path))
    client = httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _listens(path) and time.monotonic() < deadline:
            assert running.poll() is None, running.stderr and running.stderr.read()
            time.sleep(0.05)
        assert client.get("/health").text == "ok", "what connects early waits for the model"
        yield running, client
    finally:
        client.close()
        running.kill()
        running.communicate()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def engine_of(running: subprocess.Popen[str] | ForkedProgram) -> int:
    """Return the process id of a server's engine."""
    if isinstance(running, ForkedProgram):
        return engine_of_program(running.pid)
    threads = Path(f"/proc/{running.pid}/task").iterdir()
    children = [pid for item in threads for pid in (item / "children").read_text().split()]
    (result,) = [pid for pid in children if b"spawn_main" in _command(pid)]
    return int(result)


def is_gone(pid: int) -> bool:
    """Return True if the process has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
