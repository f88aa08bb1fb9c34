"""docs/quantization.md, "Add a format", works from an empty folder."""

import re
from pathlib import Path

import pytest

from lockstep.quantization import FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
FILE = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_add_a_format_page_equals_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    files = dict(FILE.findall(text))
    assert list(files) == ["plain8.py", "checkpoint.py", "generate.py"]
    assert text.count("```python") == len(files)
    (tmp_path / "plain8.py").write_text(files["plain8.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(FORMATS, "plain8", "")
    for name in ("checkpoint.py", "generate.py"):
        exec(compile(files[name], name, "exec"), {})
    (packed, plain) = capsys.readouterr().out.splitlines()
    assert packed.startswith("plain8 [") and packed.count(",") == 23
    assert plain == packed.replace("plain8", "None")
