"""Rules of the source that a program can check: words, lengths, dependencies. Imports: see
pyproject.toml."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "lockstep"
FILES = sorted(SOURCE.rglob("*.py"))
SOURCE_FILES = set(FILES)
TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "training").rglob("*.py")])
UNTYPED = "# mypy: ignore-errors"
"""First line of a file of kernels alone: their types are those of Triton or Numba."""
MAX_FUNCTION_LINES = 60
"""Lines of a function."""
FORBIDDEN = re.compile(
    r"is_prefill|is_capturing|is_dummy|is_current_stream_capturing|os\.environ|os\.getenv"
    r"|NotImplementedError|\bTODO\b|\bFIXME\b"
)

ALLOWED = {
    "__init__.py": ('os.environ.setdefault("OMP_WAIT_POLICY", "passive")',),
    "doctor/examine.py": ('os.environ["CUDA_LAUNCH_BLOCKING"] = "1"',),
}
"""Variables of other programs that have no other form, by file: one that must precede the import of
torch, and CUDA's launches in a process that doctor examines."""


def relative(path: Path) -> str:
    """Return the path within the repository, for messages."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(FILES, id="package"),
        pytest.param(TESTS, id="tests and trainer", marks=pytest.mark.slow),
    ],
)
def test_files_follow_the_rules(files: list[Path]) -> None:
    """Parse each file once and drop its tree, to keep garbage collection fast."""
    faults: list[str] = []
    for path in files:
        text = path.read_text()
        tree = ast.parse(text)
        faults += long_functions(path, tree)
        if path in SOURCE_FILES:
            faults += rules_broken(path, text, tree)
    assert not faults, "\n".join(faults)


def rules_broken(path: Path, text: str, tree: ast.Module) -> Iterator[str]:
    """Yield violations of the rules in a file of the package."""
    for allowed in ALLOWED.get(str(path.relative_to(SOURCE)), ()):
        text = text.replace(allowed, "")
    for result in FORBIDDEN.finditer(text):
        line = text.count("\n", 0, result.start()) + 1
        yield f"{relative(path)}:{line}: {result[0]}"
    if text.strip() and not ast.get_docstring(tree):
        yield f"{relative(path)}: no module docstring"
    if text.startswith(UNTYPED) and ".backend(" in text:
        yield f"{relative(path)}: mypy ignores the launcher of a backend"


def long_functions(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield functions of over MAX_FUNCTION_LINES lines. Docstring and arguments do not count."""
    statements: list[ast.AST] = [tree]
    while statements:
        result = statements.pop()
        if isinstance(result, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = lines_of(result)
            if lines > MAX_FUNCTION_LINES:
                yield f"{relative(path)}:{result.lineno}: {result.name} takes {lines}"
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(result, name, ())  # expressions hold no functions: 2 s less


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body without its docstring."""
    documented = ast.get_docstring(function) is not None and len(function.body) > 1
    first = function.body[1 if documented else 0]
    assert function.end_lineno is not None
    return function.end_lineno - first.lineno + 1


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter in which block(*names) makes imports fail."""
    block = "import sys\ndef block(*names): sys.modules.update(dict.fromkeys(names))\n"
    return subprocess.run(
        [sys.executable, "-c", block + code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


CONTROL_PLANE = """
block("torch")
import lockstep.engine.engine, lockstep.engine.engine_loop, lockstep.engine.async_engine
import lockstep.engine.thread_transport, lockstep.engine.process_transport
import lockstep.scheduling.scheduler, lockstep.cache.cache
"""


def test_control_plane_imports_no_torch() -> None:
    done = run(CONTROL_PLANE)
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


@pytest.mark.slow
def test_engine_imports_no_text_and_cli_no_server() -> None:
    """The engine and its dependencies import neither the tokenizer nor the chat template.

    generate, check, bench and explain run without the packages of the server, of the load generator
    and of the tests, and without Triton. One interpreter: torch is slow to import.
    """
    done = run(ENGINE + COMMANDS)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
