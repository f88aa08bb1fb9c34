"""Examination of all kernels that a model needs, and their results for servers to read."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.doctor.children import STAGE_SECONDS, Children, Finding, Result
from lockstep.doctor.examine import ASYNCHRONOUS, BLOCKING, Job
from lockstep.doctor.system import num_cores
from lockstep.kernels.architecture import architecture_of
from lockstep.kernels.backends import all_ops
from lockstep.kernels.health import machine, write_health
from lockstep.kernels.selection import BackendHealth, KernelSelection, Replacement
from lockstep.layers.build_context import KernelNeed
from lockstep.progress import Progress

Key = tuple[str, str]
"""Op and backend."""
Served = dict[Key, tuple[KernelNeed, ...]]
"""Needs that each backend serves."""
GPU_PARALLEL = 4
"""Processes at a time on a GPU: each compiles and compares on the host most of the time."""
MODES = {"cuda": (ASYNCHRONOUS, BLOCKING), "cpu": (ASYNCHRONOUS,)}
"""Kinds of launches, by device. A CPU's are all blocking."""


@dataclass(frozen=True)
class ExaminedBackend:
    """Backend of an op with what was found.

    seconds: of all its processes. us: case name -> microseconds, measured where a backend is
    replaced.
    """

    op: str
    backend: str
    findings: list[Finding]
    checks: int
    seconds: float
    us: dict[str, float] = field(default_factory=dict)

    @property
    def health(self) -> BackendHealth:
        """Return the result as servers read it."""
        finding = self.findings[0].brief if self.findings else None
        return BackendHealth(self.op, self.backend, finding, self.us)


@dataclass(frozen=True)
class KernelReport:
    """Results of doctor for the kernels of a model on this machine.

    replacements: of sick backends. unserved: ops without a healthy backend. path: file that servers
    read, None where it was not written. late: backends that the deadline left out.
    """

    machine: dict[str, str]
    examined: list[ExaminedBackend]
    replacements: list[Replacement]
    unserved: list[str]
    path: Path | None = None
    late: list[Key] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Return the findings of all backends."""
        return [finding for entry in self.examined for finding in entry.findings]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self) | {"path": None if self.path is None else str(self.path)}


@dataclass(frozen=True)
class Doctor:
    """Examiner of kernels.

    modes: kinds of launches, None for the device's. every: examine every backend that serves, not
    only those that a server would choose. imports: modules that add backends. stage_seconds: time
    limit of a check. save: keep the results for servers. deadline: time of the monotonic clock
    after which no examination begins.
    """

    device: str
    modes: tuple[str, ...] | None = None
    every: bool = False
    imports: tuple[str, ...] = ()
    stage_seconds: float = STAGE_SECONDS
    save: bool = True
    deadline: float = math.inf

    def examine(self, needs: Sequence[KernelNeed], progress: Progress) -> KernelReport:
        """Examine the backends that serve these needs, best first, until a healthy one is found."""
        children = Children(
            arch_name(self.device), self._num_processes(), self.stage_seconds, self.deadline
        )
        served = backends_of(needs)
        examined: dict[Key, ExaminedBackend] = {}
        late: list[Key] = []
        while not late and (jobs := self._next_jobs(served, examined)):
            results = list(children.run(jobs, progress))
            ran = [result.job for result in results]
            late = list(dict.fromkeys((job.op, job.backend) for job in jobs if job not in ran))
            for entry in merge_modes(results):
                # A backend that ran with one kind of launches only is not known to be healthy.
                if entry.findings or (entry.op, entry.backend) not in late:
                    examined[entry.op, entry.backend] = entry
        self._time_replaced(children, served, examined, progress)
        health = {key: entry.health for key, entry in examined.items()}
        replacements, unserved = find_replacements(needs, KernelSelection(health=health))
        path = write_health(self.device, health.values()) if self.save else None
        return KernelReport(
            machine(self.device), list(examined.values()), replacements, unserved, path, late
        )

    def _num_processes(self) -> int:
        """Return the number of processes that examine at a time."""
        if self.device == "cuda":
            return GPU_PARALLEL
        # A container may have a few of the machine's cores.
        return max(1, num_cores() // 2)

    def _next_jobs(self, served: Served, examined: dict[Key, ExaminedBackend]) -> list[Job]:
        """Return the jobs of the best unexamined backends of needs without a healthy one."""
        return [
            Job(*key, self.device, needs, mode, self.imports)
            for key, needs in served.items()
            if key not in examined
            and (self.every or any(_is_next(key, need, served, examined) for need in needs))
            for mode in self.modes or MODES[self.device]
        ]

    def _time_replaced(
        self,
        children: Children,
        served: Served,
        examined: dict[Key, ExaminedBackend],
        progress: Progress,
    ) -> None:
        """Time the backends of ops that have a sick one, one after another."""
        sick = {op for (op, _), entry in examined.items() if entry.findings}
        # One process at a time, so that times are not disturbed.
        alone = Children(children.arch, 1, children.stage_seconds)
        jobs = [
            Job(op, backend, self.device, served[op, backend], imports=self.imports, timed=True)
            for op, backend in examined
            if op in sick
        ]
        for result in alone.run(jobs, progress):
            key = (result.job.op, result.job.backend)
            examined[key] = replace(examined[key], us=result.us)


def arch_name(device: str) -> str:
    """Return the name of a device's architecture: sm_90, or the machine's and its instructions."""
    if device == "cuda":
        return architecture_of(device).name
    about = machine(device)
    return f"{about['device']} {about['isa']}"


def backends_of(needs: Iterable[KernelNeed]) -> Served:
    """Return the needs that each backend serves, by (op, backend), best backends of an op first."""
    ops = all_ops()
    by_op: dict[str, list[KernelNeed]] = {}
    for need in needs:
        by_op.setdefault(need.op, []).append(need)
    served: Served = {}
    for name, needs_of_op in by_op.items():
        reasons = [ops[name].explain(**need.traits) for need in needs_of_op]
        # All explanations have the same order. The first need's backends need not be the best ones.
        for backend in reasons[0]:
            pairs = zip(needs_of_op, reasons, strict=True)
            needs_of_backend = tuple(need for need, why in pairs if why[backend] is None)
            if needs_of_backend:
                served[name, backend] = needs_of_backend
    return served


def _is_next(
    key: Key, need: KernelNeed, served: Served, examined: dict[Key, ExaminedBackend]
) -> bool:
    """Return whether every better backend that serves a need was found sick."""
    for other, needs in served.items():
        if other == key:
            return True
        if other[0] == need.op and need in needs:
            result = examined.get(other)
            if result is None or not result.findings:
                return False
    return True


def merge_modes(results: Iterable[Result]) -> list[ExaminedBackend]:
    """Return one entry per backend: findings of both kinds of launches are one finding."""
    entries: dict[Key, ExaminedBackend] = {}
    for result in results:
        key = (result.job.op, result.job.backend)
        previous = entries.get(key, ExaminedBackend(*key, [], 0, 0.0))
        findings = list(previous.findings)
        for finding in result.findings:
            same = [
                index
                for index, other in enumerate(findings)
                if (other.kind, other.case) == (finding.kind, finding.case)
            ]
            if same:
                other = findings[same[0]]
                findings[same[0]] = replace(other, modes=(*other.modes, *finding.modes))
            else:
                findings.append(finding)
        entries[key] = ExaminedBackend(
            *key, findings, previous.checks + result.checks, previous.seconds + result.seconds
        )
    return list(entries.values())


def find_replacements(
    needs: Iterable[KernelNeed], selection: KernelSelection
) -> tuple[list[Replacement], list[str]]:
    """Return the replacements that a server would make, and the ops without a healthy backend."""
    from lockstep.errors import ConfigError

    replacements: list[Replacement] = []
    unserved: list[str] = []
    for need in needs:
        try:
            replacement = selection.choose(all_ops()[need.op], **need.traits)[2]
        except ConfigError:
            if need.op not in unserved:
                unserved.append(need.op)
            continue
        if replacement is not None and replacement not in replacements:
            replacements.append(replacement)
    return replacements, unserved
