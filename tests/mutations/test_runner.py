"""Trials are run in parallel, each command also without a fault, and their results are written."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.mutations import __main__ as command
from tests.mutations import suite
from tests.mutations.faults import FAST, FAULTS
from tests.mutations.runner import judged, run_trials, trials_of
from tests.mutations.suite import DOCTOR, Result, Trial, run_trial

CHECKED = next(fault for fault in FAULTS if not fault.test)
TESTED = next(fault for fault in FAULTS if fault.name in FAST)


def test_trials_of_commands() -> None:
    assert trials_of([CHECKED, TESTED], ()) == [
        Trial(CHECKED, "default"),
        Trial(TESTED, "test", TESTED.test),
    ]
    assert trials_of([CHECKED, TESTED], ("quick", "default", "test")) == [
        Trial(CHECKED, "default"),
        Trial(TESTED, "default"),
        Trial(CHECKED, "quick"),
        Trial(TESTED, "quick"),
        Trial(TESTED, "test", TESTED.test),
    ]


def test_results_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(
        trials: Sequence[Trial], jobs: int, seed: int, max_seconds: float
    ) -> Iterator[tuple[Trial, Result]]:
        assert (jobs, seed, max_seconds) == (3, 5, 60)
        for trial in trials:
            case = "scenario 3" if trial.command == "default" else ""
            yield trial, Result(case, "tokens" if case else "", 7.5)

    monkeypatch.setattr(command, "run_trials", run)
    path = tmp_path / "results.json"
    options = ["--commands", "quick,default", "--jobs", "3", "--seed", "5", "--max-seconds", "60"]
    arguments = ["mutations", CHECKED.name, *options, "--json", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == 0
    out = capsys.readouterr().out
    assert f"| {CHECKED.name} | table | quick | NOT FOUND  | 8 |" in out
    assert f"| {CHECKED.name} | table | default | scenario 3: tokens | 8 |" in out
    assert "quick: 0 of 1 found\n0 not found by any command" in out
    (entry,) = json.loads(path.read_text())["faults"]
    assert entry["group"] == "faults" and entry["name"] == CHECKED.name
    assert entry["commands"] == {
        "default": {"case": "scenario 3", "what": "tokens", "seconds": 7.5, "ran": True},
        "quick": {"case": "", "what": "", "seconds": 7.5, "ran": True},
    }


def test_faults_that_were_not_run_are_not_called_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(trials: Sequence[Trial], *options: object) -> Iterator[tuple[Trial, Result]]:
        for trial in trials:
            yield trial, Result("", "it needs a GPU", 0.0, ran=False)

    monkeypatch.setattr(command, "run_trials", run)
    monkeypatch.setattr("sys.argv", ["mutations", CHECKED.name, "--commands", "quick"])
    assert command.main() == 1
    out = capsys.readouterr().out
    assert f"0 not found by any command\n1 not run\n  {CHECKED.name}" in out


def test_an_unknown_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["mutations", "--commands", "quick,doctors"])
    with pytest.raises(SystemExit):
        command.main()
    allowed = "allowed are quick, default, full, doctor, test"
    assert f"--commands doctors: {allowed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "case"),
    [
        ('{"kernels": {"examined": [{"findings": []}]}}', ""),
        (
            '{"kernels": {"examined": [{"findings": []}, {"findings": [{"op": "linear", '
            '"backend": "cpu", "check": "rows", "detail": "other bits"}]}]}}',
            "linear, cpu: rows",
        ),
        ("", "the doctor itself"),
    ],
    ids=["healthy", "sick", "crashed"],
)
def test_findings_of_the_doctor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str, case: str
) -> None:
    done = subprocess.CompletedProcess([], int(bool(case)), out, "Traceback\nKeyError: 'linear'")
    monkeypatch.setattr(suite, "_python", lambda *arguments: done)
    assert run_trial(Trial(None, DOCTOR), tmp_path).case == case


@pytest.mark.parametrize(
    ("without_fault", "expected"),
    [
        (Result("", "", 1.0), Result("scenario 3", "tokens", 7.5)),
        (
            Result("scenario 1", "bits", 1.0),
            Result("", "without a fault: scenario 1 bits", 7.5, ran=False),
        ),
        (
            Result("", "it needs a GPU", 0.0, ran=False),
            Result("", "without a fault:  it needs a GPU", 7.5, ran=False),
        ),
    ],
    ids=["clean", "not clean", "not run"],
)
def test_a_command_that_fails_without_a_fault_counts_as_not_run(
    without_fault: Result, expected: Result
) -> None:
    assert judged(Result("scenario 3", "tokens", 7.5), without_fault) == expected


@pytest.mark.slow
def test_a_fault_is_found_in_a_process() -> None:
    """Run the sound copy and a fault in two processes."""
    ((trial, result),) = run_trials(trials_of([TESTED], ()), jobs=2, seed=0, max_seconds=300)
    assert trial == Trial(TESTED, "test", TESTED.test)
    assert result.case.startswith(TESTED.test)
    assert result.seconds > 0
