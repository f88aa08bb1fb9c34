"""Child processes of examinations: a crash or a hang of a kernel ends one of them, never doctor.

A fork server that has imported torch once forks a process per job.
"""

import math
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lockstep.child_processes import blocked_signals
from lockstep.doctor.examine import Done, Fault, Job, Stage, run_job
from lockstep.progress import Progress

PRELOADED = "lockstep.doctor.preload"
STAGE_SECONDS = 120.0
"""Time limit of one check of one case, a compilation included."""
KINDS = {
    "illegal instruction": "illegal instruction",
    "crash": "its process was ended by a signal",
    "exit": "its process ended by itself",
    "hang": "a check did not end within its time limit",
    "error": "it raised an error",
    "wrong numbers": "numbers differ from the reference's",
    "unstable": "equal calls give other bits",
    "writes outside": "it writes outside of its tensors",
    "changes inputs": "it changes arguments that it should only read",
    "unwritten": "it returns memory that it did not write",
    "rows": "a row's bits depend on the batch",
    "graph": "a captured graph gives other bits",
    "race": "other bits under the load of a second stream",
}
"""Kinds of findings, and what each means."""
LOG_LINES = 4
"""Last lines of a dead process's output that a finding shows."""


@dataclass(frozen=True)
class Finding:
    """Fault of one backend of an op.

    kind: one of KINDS. check, case: names of the check that ran and of its case. arch: name of the
    device's architecture. modes: kinds of launches in which it was found. detail: numbers, an error
    message, or the last output of a process that died.
    """

    op: str
    backend: str
    kind: str
    check: str
    case: str
    arch: str
    modes: tuple[str, ...]
    detail: str

    @property
    def brief(self) -> str:
        """Return the finding in a few words, for a server's start and for the cache."""
        mode = "" if len(self.modes) != 1 else f", with {self.modes[0]} launches"
        return f"{self.kind} at {self.case} on {self.arch}{mode}"


@dataclass(frozen=True)
class Result:
    """Result of a job.

    checks: checks that ran. us: case -> microseconds of a call, for a timed job only. seconds:
    duration, the start of the process included.
    """

    job: Job
    findings: list[Finding]
    checks: int = 0
    us: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Children:
    """Processes that run jobs.

    arch: name of the device's architecture, for findings. parallel: processes at a time.
    stage_seconds: time limit of a check. deadline: time of the monotonic clock after which no job
    begins.
    """

    def __init__(
        self,
        arch: str,
        parallel: int = 1,
        stage_seconds: float = STAGE_SECONDS,
        deadline: float = math.inf,
    ) -> None:
        self.arch = arch
        self.parallel = parallel
        self.stage_seconds = stage_seconds
        self.deadline = deadline
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([PRELOADED])

    def run(self, jobs: Sequence[Job], progress: Progress) -> Iterator[Result]:
        """Run the jobs that begin in time, and yield their results in order.

        progress: (text, done, total).
        """
        with ThreadPoolExecutor(self.parallel) as pool:
            for done, result in enumerate(pool.map(self._run_in_time, jobs), 1):
                if result is None:
                    continue
                progress(f"{result.job.op}, {result.job.backend}", done, len(jobs))
                yield result

    def _run_in_time(self, job: Job) -> Result | None:
        """Run a job, or return None if the deadline has passed."""
        return None if time.monotonic() >= self.deadline else self.run_one(job)

    def run_one(self, job: Job) -> Result:
        """Run a job in a process and return what it found, dead or alive."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
            log = Path(folder) / "log"
            receiver, sender = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=run_job, args=(job, sender, str(log)), daemon=True
            )
            with blocked_signals():
                process.start()
            sender.close()
            faults, stage, done, hung = self._listen(receiver)
            if not hung:
                # A sick device may also hold a process that has sent all of its results.
                process.join(self.stage_seconds)
                hung = process.is_alive()
            if hung:
                process.kill()
            process.join()
            receiver.close()
            findings = [self._finding(job, fault) for fault in faults]
            if done is None and (hung or process.exitcode != 0 or not faults):
                tail = "" if hung else _tail(log)
                kind, detail = _death(hung, process.exitcode, self.stage_seconds)
                fault = Fault(kind, stage, "; ".join(part for part in (detail, tail) if part))
                findings.append(self._finding(job, fault))
        seconds = time.monotonic() - began
        if done is None:
            return Result(job, findings, seconds=seconds)
        return Result(job, findings, done.checks, done.us, seconds)

    def _listen(self, receiver: Connection) -> tuple[list[Fault], Stage, Done | None, bool]:
        """Receive from a process until it ends -> (faults, last stage, Done, whether it hung)."""
        faults: list[Fault] = []
        stage = Stage("start", "")
        while receiver.poll(self.stage_seconds):
            try:
                message = receiver.recv()
            except (EOFError, OSError):
                return faults, stage, None, False
            if isinstance(message, Stage):
                stage = message
            elif isinstance(message, Fault):
                faults.append(message)
            else:
                return faults, stage, message, False
        return faults, stage, None, True

    def _finding(self, job: Job, fault: Fault) -> Finding:
        return Finding(
            job.op, job.backend, fault.kind, fault.stage.check, fault.stage.case,
            self.arch, (job.mode,), fault.detail,
        )  # fmt: skip


def _death(hung: bool, exitcode: int | None, seconds: float) -> tuple[str, str]:
    """Return (kind, detail) of a process that ended without a result."""
    if hung:
        return "hang", f"no end within {seconds:g} s"
    code = exitcode or 0
    if code == -signal.SIGILL:
        return "illegal instruction", "SIGILL"
    if code < 0:
        return "crash", signal.Signals(-code).name
    return "exit", f"exit status {code}"


def _tail(log: Path) -> str:
    """Return the last lines of a process's output."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return " / ".join(line.strip() for line in lines[-LOG_LINES:] if line.strip())[:400]
