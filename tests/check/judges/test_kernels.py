"""The kernels section adds what doctor found: a case per kernel, a failure per finding."""

import pytest

from lockstep.check.checked_model import CheckedModel
from lockstep.check.deadline import TIME_UP, Deadline
from lockstep.check.judges.kernels import add_kernels, run_kernels
from lockstep.check.report.coverage import Coverage
from lockstep.check.report.report import Report
from lockstep.doctor.children import Finding
from lockstep.doctor.kernels import ExaminedBackend, KernelReport
from lockstep.progress import ignore_progress

FINDING = Finding("rms_norm", "fast", "crash", "call", "1x80", "sm_86", ("blocking",), "SIGABRT")


def test_findings_are_failures_and_late_kernels_are_left_out() -> None:
    report = Report("quick", coverage=Coverage(), section_seconds={"kernels": 2.0})
    entries = [
        ExaminedBackend("rms_norm", "fast", [FINDING], 9, 1.0),
        ExaminedBackend("linear", "slow", [], 9, 1),
    ]
    add_kernels(KernelReport({}, entries, [], ["rms_norm"], late=[("sample", "triton")]), report)
    assert (report.cases, report.failed) == (2, 2)
    assert report.failures[0].place == "kernels, rms_norm by fast"
    assert "crash at 1x80 on sm_86, with blocking launches, check call: SIGABRT" in report.verdict
    assert report.failures[1].what == "no healthy backend"
    assert report.not_exercised()[TIME_UP] == ["kernel sample by triton"]
    (section,) = (section for section in report.sections if section.name == "kernels")
    assert (section.state, section.cases, section.passed, section.failed) == ("failed", 2, 1, 2)
    assert report.coverage is not None and report.coverage.backends["linear"] == {"slow"}


def test_kernels_of_the_users_settings_are_listed(model: str) -> None:
    """No examination begins after the deadline, so every kernel is listed."""
    settings = {"load_format": "dummy", "device": "cpu", "kv_cache_dtype": "fp8"}
    report = Report("quick")
    run_kernels(CheckedModel(model, settings, report, ignore_progress), Deadline.after(0.0))
    late = report.not_exercised()[TIME_UP]
    assert {part.partition(" by ")[0] for part in late} >= {"kernel linear", "kernel sample"}
    assert (report.cases, report.failed) == (0, 0)


@pytest.mark.slow
def test_kernels_of_a_tiny_model_are_healthy(model: str) -> None:
    settings = {"load_format": "dummy", "device": "cpu"}
    report = Report("quick")
    run_kernels(CheckedModel(model, settings, report, ignore_progress))
    assert report.cases > 10 and report.failed == 0, report.verdict
