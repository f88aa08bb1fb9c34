"""Files that settings name."""

from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.settings import check_writable, why_unread


def test_a_file_that_is_tried_stays_as_it_was(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("what stood there")
    for path in (kept, tmp_path / "new"):
        check_writable("report", path)
    assert kept.read_text() == "what stood there"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a", tmp_path / ("x" * 9_999)):
        with pytest.raises(ConfigError, match="report='.* is not allowed; .* can be written"):
            check_writable("report", path)


def test_reasons_are_short() -> None:
    assert why_unread(FileNotFoundError(2, "No such file", "x" * 9_999)) == "No such file"
    assert len(why_unread(ValueError("x" * 9_999))) == 200
