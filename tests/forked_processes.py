"""Processes that are forked from a server with all imports, which take seconds in a new process."""

import multiprocessing
import os
import signal
import subprocess
import sys
from functools import cache
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TextIO

from lockstep.bench.measurement import children_of
from lockstep.engine import process_transport

PRELOADED_MODULE = "tests.forked_imports"


@cache
def fork_context() -> ForkServerContext:
    """Return a context of processes that a server forks with all imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED_MODULE])
    return context


def start_fork_server() -> str:
    """Start this process's fork server, unless it runs already, and return its address.

    What its processes print is dropped, since pytest cannot capture it for a test. A run without
    xdist shows it with the test that failed.
    """
    fork_context()
    outputs = [(number, os.dup(number)) for number in (1, 2)]
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number, _ in outputs:
        os.dup2(nothing, number)
    try:
        forkserver.ensure_running()
    finally:
        for number, output in outputs:
            os.dup2(output, number)
            os.close(output)
        os.close(nothing)
    return forkserver._forkserver._forkserver_address


def use_fork_server(address: str) -> None:
    """Fork this process's processes from the fork server of another process."""
    server = forkserver._forkserver
    server._forkserver_address = address
    # Each request to fork sends the pipe that keeps the server alive. The other process has it.
    server._forkserver_alive_fd = os.pipe()[1]
    _start_no_fork_server()


def fork_engines() -> None:
    """Fork the engines of this process, a ForkedProgram, from the server that has forked it."""
    _start_no_fork_server()
    process_transport.get_context = lambda _: fork_context()


def _start_no_fork_server() -> None:
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running


def name_after_parent() -> None:
    """Let engine_of_program() find this process, which a forked program has started."""
    parent = parent_process()
    assert parent is not None
    Path("/proc/self/comm").write_text(_name_of_engine(parent.pid))


def engine_of_program(pid: int) -> int:
    """Return the engine of a forked program that has called fork_engines()."""
    server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    name = _name_of_engine(pid)
    (engine,) = [child for child in children_of(server) if _name_of(child) == name]
    return engine


def _name_of(pid: int) -> str:
    """Return the name of a process, "" if it has ended: the server forks for other tests too."""
    try:
        return Path(f"/proc/{pid}/comm").read_text()[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _name_of_engine(parent: int | None) -> str:
    return f"of {parent}"


def forked_children(pid: int) -> list[int]:
    """Return the processes that the fork server of a process has forked: of an engine, its ranks.

    A fork server and what it forks have the same command line.
    """
    servers = [child for child in children_of(pid) if _is_forked(child)]
    return [child for server in servers for child in children_of(server) if _is_forked(child)]


def second_rank(engine: int) -> int:
    """Return the process id of the only rank that an engine's process has forked."""
    (rank,) = forked_children(engine)
    return rank


def _is_forked(pid: int) -> bool:
    return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()


class ForkedProgram:
    """Program like `subprocess.Popen([sys.executable, "-c", code, *arguments], text=True)`, with
    pipes and its own session."""

    def __init__(self, code: str, arguments: list[str]) -> None:
        context = fork_context()
        self.stdout, out = _text_pipe(context)
        self.stderr, errors = _text_pipe(context)
        self._process = context.Process(target=_run, args=(code, arguments, out, errors))
        self._process.start()
        out.close()
        errors.close()

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the status of the ended process."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the status, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for the end and return the status. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked program", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """Wait for the end, and return the rest of both outputs, once."""
        self.wait(timeout)
        if self.stdout.closed:
            return "", ""
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        """Send a signal to a process that runs."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()


def _text_pipe(context: ForkServerContext) -> tuple[TextIO, Connection]:
    """Return the reading end of a pipe as a text file, and the writing end for a process."""
    reads, writes = context.Pipe(duplex=False)
    with reads:
        return os.fdopen(os.dup(reads.fileno()), "r"), writes


def _run(code: str, arguments: list[str], out: Connection, errors: Connection) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    out.close()
    errors.close()
    # Those of the server remember what kind of file it has.
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})
