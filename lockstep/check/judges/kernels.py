"""Examination of the kernels that the user's settings need, by the code of `lockstep doctor`."""

import math

from lockstep.check.checked_model import CheckedModel
from lockstep.check.deadline import NO_DEADLINE, TIME_UP, Deadline
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.matrix.setups import KERNEL, Setup
from lockstep.check.report.report import Report, Tally
from lockstep.check.sections import KERNELS
from lockstep.doctor.kernels import Doctor, KernelReport
from lockstep.doctor.needs import kernels_of

SETUP = Setup(NO_DRAFTER, 0, KERNEL, "none")


def run_kernels(checked: CheckedModel, deadline: Deadline = NO_DEADLINE) -> None:
    """Examine every kernel in a child process, and add the results to the report.

    Nothing is kept for servers: that is left to `lockstep doctor`.
    """
    at = math.inf if deadline.at is None else deadline.at
    doctor = Doctor(checked.device, save=False, deadline=at)

    def show(what: str, done: int, total: int) -> None:
        checked.progress(f"kernels: {what}", done, total)

    needs = kernels_of(checked.config, checked.device)
    add_kernels(doctor.examine(needs, show), checked.report)


def add_kernels(kernels: KernelReport, report: Report) -> None:
    """Add the results of doctor to the report: a case per backend, a failure per finding."""
    for entry in kernels.examined:
        name = f"{entry.op} by {entry.backend}"
        for finding in entry.findings:
            what = f"{finding.brief}, check {finding.check}: {finding.detail}"
            report.fail(SETUP, name, what, "the kernel alone")
        failed = int(bool(entry.findings))
        report.add(Tally(SETUP, 1, failed, round(entry.seconds, 2), name))
        if report.coverage is not None:
            report.coverage.record_kernel(entry.op, entry.backend)
    for op in kernels.unserved:
        report.fail(SETUP, op, "no healthy backend", "every layer")
    for op, backend in kernels.late:
        report.omit(KERNELS, f"kernel {op} by {backend}", TIME_UP)
