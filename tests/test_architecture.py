"""The house rules that a program can hold: imports go down, words, who knows what."""

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
FORBIDDEN = re.compile(
    r"is_prefill|is_capturing|is_dummy|is_current_stream_capturing|os\.environ|os\.getenv"
    r"|NotImplementedError|\bTODO\b|\bFIXME\b"
)

ALLOWED = {"__init__.py": 'os.environ.setdefault("OMP_WAIT_POLICY", "passive")'}
"""The one setting of the process that must stand before torch is imported, from wherever."""

# The first stands lowest. The scheduler and what it schedules know no torch and serve the runner.
LAYERS = (
    ("errors",),
    ("settings", "step", "outputs", "sampling_params"),
    ("kernels",),
    ("quant", "cache", "parallel"),
    ("layers",),
    ("models",),
    ("scheduling", "spec"),
    ("config",),
    ("runner",),
    ("engine",),
    ("text",),
    ("llm",),
    ("example_prompts",),
    ("serve", "check", "bench"),
    ("cli",),
    ("__main__",),
)


def relative(path: Path) -> str:
    """lockstep/a/b.py, for messages."""
    return str(path.relative_to(ROOT))


def level(module: str) -> tuple[int, str] | None:
    """Where a module stands: (height, the name it stands under); None outside of the layers."""
    name = module.removeprefix("lockstep").lstrip(".")
    found = [
        (len(unit), height, unit)
        for height, units in enumerate(LAYERS)
        for unit in units
        if name == unit or name.startswith(unit + ".")
    ]
    return max(found)[1:] if found else None


def module_name(path: Path) -> str:
    """lockstep/a/b.py -> lockstep.a.b"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module of ours that a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("lockstep"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
            for alias in node.names:
                inner = (
                    SOURCE.parent / str(node.module).replace(".", "/") / alias.name
                ).with_suffix
                is_module = inner(".py").exists() or inner("").is_dir()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def upward(importer: str, imported: str) -> bool:
    """Whether this import goes up, or sideways into a sibling of the same height."""
    mine, theirs = level(importer), level(imported)
    if mine is None or theirs is None:
        return False
    below = {"settings", "step", "outputs", "sampling_params", "quant", "cache", "parallel"}
    sideways_allowed = mine[1] in below and theirs[1] in below
    if theirs[0] == mine[0]:
        return theirs[1] != mine[1] and not sideways_allowed
    return theirs[0] > mine[0]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_keeps_the_rules(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    lines = [line for line in lines if line != ALLOWED.get(str(path.relative_to(SOURCE)))]
    faults = [f"line {i}: {m[0]}" for i, t in enumerate(lines, 1) if (m := FORBIDDEN.search(t))]
    if not ast.get_docstring(tree) and text.strip():
        faults.append("no module docstring")
    faults += [
        f"imports {other}, which stands above"
        for other in imports(tree)
        if upward(module_name(path), other)
    ]
    assert not faults, f"{relative(path)}: {faults}"


def test_every_top_level_module_has_a_place() -> None:
    """A new package must be given its height before anything imports it."""
    names = {p.relative_to(SOURCE).parts[0].removesuffix(".py") for p in FILES} - {"__init__"}
    placed = {unit for units in LAYERS for unit in units}
    assert names <= placed, f"no place among the layers: {sorted(names - placed)}"


def test_upward_imports_are_seen() -> None:
    """The rule has teeth: these are the imports that it exists to refuse."""
    assert upward("lockstep.kernels.linear", "lockstep.layers.linear")
    assert upward("lockstep.scheduling.scheduler", "lockstep.runner.runner")
    assert upward("lockstep.engine.engine", "lockstep.text.tokenizer")
    assert upward("lockstep.check.matrix", "lockstep.serve.app")
    assert not upward("lockstep.runner.runner", "lockstep.scheduling.request")
    assert not upward("lockstep.llm", "lockstep.text.tokenizer")


def runs_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter where importing `blocked` fails."""
    guard = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", guard + code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_scheduler_runs_without_torch() -> None:
    code = "import lockstep.scheduling.scheduler, lockstep.scheduling.request, lockstep.cache.cache"
    done = runs_without(("torch",), code)
    assert done.returncode == 0, done.stderr


def test_engine_knows_no_text() -> None:
    """The engine and all below it import neither the tokenizer nor the chat template."""
    code = "import lockstep.engine.engine, lockstep.engine.async_engine\nimport sys\n"
    code += "assert not [m for m in sys.modules if m.startswith('lockstep.text')]"
    done = runs_without(("tokenizers", "fastapi", "transformers"), code)
    assert done.returncode == 0, done.stderr


def test_command_line_runs_without_server_packages() -> None:
    """generate, check, bench and explain work where fastapi and uvicorn are not installed."""
    code = "import lockstep.llm, lockstep.check, lockstep.bench\nfrom lockstep.cli import app\n"
    code += "from typer.main import get_command\n"
    code += "get_command(app).main(['generate', '--help'], standalone_mode=False)"
    done = runs_without(("fastapi", "uvicorn", "starlette", "prometheus_client", "triton"), code)
    assert done.returncode == 0, done.stderr
    assert "--compare" in done.stdout
