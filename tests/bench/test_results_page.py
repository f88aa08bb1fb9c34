"""benchmarks/RESULTS.md is generated from the result files."""

import json
from pathlib import Path

import pytest

from benchmarks import render_results


def test_the_page_is_generated() -> None:
    """If it fails: python benchmarks/render_results.py"""
    assert render_results.PAGE.read_text() == render_results.page()


def test_a_quantity_has_one_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(render_results, "FOLDER", tmp_path)
    cell = dict.fromkeys(render_results.FIELDS, "1")
    folder = tmp_path / "results"
    folder.mkdir()
    section = {"title": "Steps", "order": 1, "cells": [cell, cell]}
    (folder / "a.json").write_text(json.dumps(section))
    with pytest.raises(ValueError, match="Steps: a cell occurs twice"):
        render_results.sections()


def test_a_figure_has_its_commit_machine_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(render_results, "FOLDER", tmp_path)
    folder = tmp_path / "results"
    folder.mkdir()
    section = {"title": "Steps", "order": 1, "cells": [{"cell": "a", "figure": "1"}]}
    (folder / "a.json").write_text(json.dumps(section))
    with pytest.raises(ValueError, match="must have the fields"):
        render_results.sections()
