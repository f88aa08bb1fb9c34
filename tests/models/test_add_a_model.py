"""docs/add_a_model.md works from an empty folder, with less than 100 lines of code."""

import re
from pathlib import Path

from tests.forked_processes import ForkedProgram

ROOT = Path(__file__).parent.parent.parent
FILE = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = """
import os, runpy, sys
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
runpy.run_path("checkpoint.py", run_name="__main__")
runpy.run_path("generate.py", run_name="__main__")
"""
"""Program that runs both scripts in one interpreter, since torch is slow to import."""


def test_add_a_model_page_builds_and_generates(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add_a_model.md").read_text()
    files = dict(FILE.findall(page))
    assert set(files) == {"seesaw.py", "checkpoint.py", "generate.py"}
    assert page.count("```python") == len(files)
    assert sum(len(text.splitlines()) for text in files.values()) < 100
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    program = ForkedProgram(RUN, [str(tmp_path)])
    output, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors[-3000:]
    plain, drafted = (line.partition("] ") for line in output.splitlines())
    assert plain[0] == drafted[0] and plain[0].count(",") == 39
    assert plain[2] == "0 drafts accepted" and int(drafted[2].split()[0]) > 0
