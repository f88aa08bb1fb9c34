"""docs/add_a_model.md works from an empty folder, with less than 100 lines of code."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FILE = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = """
import runpy
runpy.run_path("checkpoint.py", run_name="__main__")
runpy.run_path("generate.py", run_name="__main__")
"""
"""Both scripts in one interpreter, since torch is slow to import."""


def test_add_a_model_page_builds_and_generates(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add_a_model.md").read_text()
    files = dict(FILE.findall(page))
    assert set(files) == {"seesaw.py", "checkpoint.py", "generate.py"}
    assert page.count("```python") == len(files)
    assert sum(len(text.splitlines()) for text in files.values()) < 100
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n" + RUN,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain, drafted = (line.partition("] ") for line in done.stdout.splitlines())
    assert plain[0] == drafted[0] and plain[0].count(",") == 39
    assert plain[2] == "0 drafts accepted" and int(drafted[2].split()[0]) > 0
