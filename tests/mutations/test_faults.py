"""Every fault is found by the check; a few of them in the default tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations.faults import FAST, FAULTS, Fault
from tests.mutations.suite import SOURCE, copied, mutated, try_fault

AREAS = {
    "table", "sampler", "cache", "scheduler", "runner", "drafter", "mixer", "numerics", "request",
    "text", "engine",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with copied(tmp_path_factory.mktemp("copy")) as folder:
        yield folder


def test_there_are_enough_and_everywhere() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert {fault.area for fault in FAULTS} == AREAS
    assert set(FAST) <= {fault.name for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    sound = (SOURCE / fault.file).read_text(encoding="utf-8")
    compile(mutated(sound, fault), fault.file, "exec")


def test_a_fault_that_the_house_no_longer_holds_says_so() -> None:
    gone = Fault("gone", "table", "config.py", "no such line", "")
    with pytest.raises(ValueError, match="gone: config.py has 'no such line' 0 times, not once"):
        mutated("text", gone)


def found(fault: Fault, folder: Path, size: str) -> None:
    result = try_fault(fault, folder, size)
    print(f"{fault.name}: {result.case}: {result.what}, {result.seconds:.0f} s")
    assert result.case, f"{fault.name} was not found: {result.what}"


@pytest.mark.parametrize("name", FAST)
def test_quick_finds(name: str, folder: Path) -> None:
    found(next(f for f in FAULTS if f.name == name), folder, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_default_check_finds(fault: Fault, folder: Path) -> None:
    found(fault, folder, "default")


def test_a_sound_copy_is_not_mended_away(folder: Path) -> None:
    """The copy is the package as it stands, after faults were put in and taken out."""
    for path in SOURCE.rglob("*.py"):
        assert (folder / "lockstep" / path.relative_to(SOURCE)).read_bytes() == path.read_bytes()
