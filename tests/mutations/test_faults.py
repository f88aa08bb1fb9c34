"""Every fault is found, by the check or by its test; a few of them in the default tests."""

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from lockstep.check import run_check
from tests.check.faulty import flip_last_logit_bit
from tests.mutations import suite
from tests.mutations.faults import FAST, FAULTS, Fault
from tests.mutations.groups import ALL, GROUPS
from tests.mutations.patterns import PatternError
from tests.mutations.suite import (
    ROOT,
    SOURCE,
    Trial,
    copied,
    mutated,
    own_trial,
    require_sound,
    run_trial,
)
from tests.tiny_model import TWO_LAYERS, make_model

AREAS = {
    "table", "sampler", "cache", "scheduler", "worker", "drafter", "mixer", "numerics", "request",
    "text", "engine", "format", "slots", "experts", "route", "packed",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with copied(tmp_path_factory.mktemp("copy")) as folder:
        yield folder


def test_there_are_enough_and_everywhere() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL) >= 40
    assert {fault.area for fault in FAULTS} == {fault.area for fault in ALL} == AREAS
    assert set(FAST) <= {fault.name for fault in FAULTS}


def test_no_two_faults_are_equal() -> None:
    changes = {(fault.module, fault.scope, fault.old, fault.new) for fault in ALL}
    assert len(changes) == len(ALL)


@pytest.mark.parametrize("fault", GROUPS["documented_promises"], ids=lambda f: f.name)
def test_a_broken_promise_is_a_sentence_of_the_documentation(fault: Fault) -> None:
    page, _, sentence = fault.breaks.partition(": ")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert sentence in " ".join(text.split())


TESTED = [fault for fault in ALL if fault.test]


@pytest.mark.parametrize("fault", TESTED, ids=lambda f: f.name)
def test_the_test_of_a_fault_is_there(fault: Fault) -> None:
    (file, _, test) = fault.test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {test.partition('[')[0]}(" in text


@pytest.mark.parametrize(
    ("code", "out", "case"),
    [
        (0, "3 passed", ""),
        (1, "FAILED tests/a.py::b[c] - it differs", "tests/a.py::b[c]"),
        (1, "ERROR tests/a.py::b - no engine", "tests/a.py::b"),
        (2, "ERROR tests/a.py", None),
        (4, "ERROR: not found: tests/a.py::b", None),
        (5, "no tests ran", None),
    ],
)
def test_only_a_test_that_fails_finds_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, out: str, case: str | None
) -> None:
    fault = TESTED[0]
    (tmp_path / "lockstep" / fault.file).parent.mkdir(parents=True)
    done = subprocess.CompletedProcess([], code, out, "")
    monkeypatch.setattr(suite, "_python", lambda *arguments: done)
    if case is None:
        with pytest.raises(RuntimeError, match="was not run"):
            run_trial(own_trial(fault), tmp_path)
    else:
        assert run_trial(own_trial(fault), tmp_path).case == case
    mended = (tmp_path / "lockstep" / fault.file).read_bytes()
    assert mended == (SOURCE / fault.file).read_bytes()


@pytest.mark.parametrize("fault", ALL, ids=lambda f: f.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    sound = (SOURCE / fault.file).read_text(encoding="utf-8")
    compile(mutated(sound, fault), fault.file, "exec")


def test_a_fault_that_does_not_apply_says_so() -> None:
    gone = Fault("gone", "table", "config", "f", "no_such($x)", "$x")
    with pytest.raises(PatternError) as error:
        mutated("def f(a):\n    return such(a)\n", gone)
    assert str(error.value) == (
        "the fault 'gone' does not apply to config.py: 'no_such($x)' matches nothing in f. The "
        "most similar code there:\n  line 2: such(a)\n"
        "State the fault in tests/mutations for the code that is there now."
    )


def assert_found(fault: Fault, folder: Path, size: str) -> None:
    """Assert that the fault is found."""
    result = run_trial(own_trial(fault, size), folder)
    print(f"{fault.name}: {result.case}: {result.what}, {result.seconds:.0f} s")
    assert result.case, f"{fault.name} was not found: {result.what}"


@pytest.mark.parametrize("name", FAST)
def test_quick_finds(name: str, folder: Path) -> None:
    assert_found(next(f for f in FAULTS if f.name == name), folder, "quick")


@pytest.mark.slow
def test_the_check_of_a_fault_is_run_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run its script in this process, over a tiny model with one wrong bit."""
    fault = next(fault for fault in FAULTS if not fault.test)
    (tmp_path / "lockstep" / fault.file).parent.mkdir(parents=True)
    model = str(make_model(tmp_path / "model", **TWO_LAYERS))

    def run(copy: suite.Copy, *arguments: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            flip_last_logit_bit(patch)
            tiny = partial(run_check, model=model, load_format="dummy")
            patch.setattr("lockstep.check.run_check", tiny)
            patch.setattr("sys.argv", [arguments[0], *arguments[2:]])
            exec(arguments[1], {})
        return subprocess.CompletedProcess([], 0, capsys.readouterr().out, "")

    monkeypatch.setattr(suite, "_python", run)
    result = run_trial(Trial(fault, "quick"), tmp_path, seed=3)
    assert result.case.startswith("scenario ") and result.case.endswith(" of seed 3")
    assert result.what == "the bits of the logits differ"
    assert result.seconds > 0


@pytest.fixture(scope="module")
def sound_folder(folder: Path) -> Path:
    require_sound(Trial(None, "quick"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in ALL if not f.gpu], ids=lambda f: f.name)
def test_the_default_check_or_its_test_finds(fault: Fault, sound_folder: Path) -> None:
    assert_found(fault, sound_folder, "default")


FAILURE = (
    '{"failures": [{"setup": {"phase": "scenario"}, "batch": "scenario 3", "what": "tokens"}], '
    '"spent": 2.0}'
)
"""Report of a check, as its script prints it."""


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (0, FAILURE, ""),
        (1, "", "ModuleNotFoundError: No module named 'pydantic'"),
    ],
    ids=["it differs", "it does not run"],
)
def test_a_check_that_fails_without_a_fault_judges_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, out: str, err: str
) -> None:
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(suite, "_python", lambda *arguments: done)
    with pytest.raises(RuntimeError, match="quick is not clean in the copy without a fault: "):
        require_sound(Trial(None, "quick"), tmp_path)


def test_faults_leave_no_change_in_the_copy(folder: Path) -> None:
    """Compare the copy with the package after faults were put in and removed."""
    for path in SOURCE.rglob("*.py"):
        assert (folder / "lockstep" / path.relative_to(SOURCE)).read_bytes() == path.read_bytes()
