"""The house rules that a program can hold: words, who knows what. Imports: see pyproject.toml."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCREEN = 60
"""Lines."""
FORBIDDEN = re.compile(
    r"is_prefill|is_capturing|is_dummy|is_current_stream_capturing|os\.environ|os\.getenv"
    r"|NotImplementedError|\bTODO\b|\bFIXME\b"
)

ALLOWED = {"__init__.py": 'os.environ.setdefault("OMP_WAIT_POLICY", "passive")'}
"""The one setting of the process that must stand before torch is imported, from wherever."""


def relative(path: Path) -> str:
    """lockstep/a/b.py, for messages."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_keeps_the_rules(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    lines = [line for line in lines if line != ALLOWED.get(str(path.relative_to(SOURCE)))]
    faults = [f"line {i}: {m[0]}" for i, t in enumerate(lines, 1) if (m := FORBIDDEN.search(t))]
    if not ast.get_docstring(ast.parse(text)) and text.strip():
        faults.append("no module docstring")
    assert not faults, f"{relative(path)}: {faults}"


@pytest.mark.parametrize("path", [*FILES, *TESTS], ids=relative)
def test_functions_fit_a_screen(path: Path) -> None:
    """What a function does, behind its arguments and its docstring. An op takes its tensors one by
    one, and a command its options: these are no lines to follow."""
    faults = [
        f"line {found.lineno}: {found.name} takes {lines}"
        for found in ast.walk(ast.parse(path.read_text()))
        if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := lines_of(found)) > SCREEN
    ]
    assert not faults, f"{relative(path)}: {faults}"


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the first line behind the docstring to the last."""
    documented = ast.get_docstring(function) is not None and len(function.body) > 1
    first = function.body[1 if documented else 0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter, which knows `block(*names)`: importing them fails."""
    block = "import sys\ndef block(*names): sys.modules.update(dict.fromkeys(names))\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_scheduler_runs_without_torch() -> None:
    code = "block('torch')\n"
    code += (
        "import lockstep.scheduling.scheduler, lockstep.scheduling.request, lockstep.cache.cache"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


ENGINE = """
block("tokenizers", "transformers", "fastapi", "uvicorn", "starlette", "prometheus_client")
block("httpx", "matplotlib", "triton")
import lockstep.engine.engine, lockstep.engine.async_engine
assert not [m for m in sys.modules if m.startswith("lockstep.text")]
"""
COMMANDS = """
del sys.modules["tokenizers"]
import lockstep.llm, lockstep.check, lockstep.bench, lockstep.bench.serving, lockstep.cli.bench
from lockstep.cli import app
from typer.main import get_command
get_command(app).main(["generate", "--help"], standalone_mode=False)
"""


def test_engine_knows_no_text_and_the_command_line_no_server() -> None:
    """The engine and all below it import neither the tokenizer nor the chat template.

    generate, check, bench and explain work where no package of the server, of the load generator
    or of the tests is installed, nor Triton. One interpreter: torch is slow to import.
    """
    done = run(ENGINE + COMMANDS)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
