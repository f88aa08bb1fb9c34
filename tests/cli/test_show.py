"""Output helpers of commands."""

import logging

import pytest

from lockstep.cli.show import warnings_once


def test_each_warning_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("lockstep.of_this_test")
    log.propagate = False
    with warnings_once():
        for number in (1, 1, 2, 1):
            log.warning("template %d drops tools", number)
    log.warning("template %d drops tools", 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"template {number} drops tools" for number in (1, 2, 1)]
