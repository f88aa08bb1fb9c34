"""The installed package: an sdist and a wheel, built and run outside of the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(b.{}(sys.argv[1]))"


def run(*words: object, cwd: Path) -> str:
    """Run a command outside of the checkout, without its path; return its stdout."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def build(kind: str, source: Path) -> Path:
    """Return an sdist or a wheel, built from a copy of the needed files."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lockstep", source / "lockstep", ignore=ignored)
    words = (sys.executable, "-c", BUILD.format(f"build_{kind}"), source / "dist")
    return source / "dist" / run(*words, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel."""
    return build("wheel", tmp_path_factory.mktemp("source"))


def package_files() -> set[str]:
    """Files of the package in the checkout."""
    result = (path for path in (ROOT / "lockstep").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in result if "__pycache__" not in path.parts}


def test_wheel_contains_every_file(wheel: Path) -> None:
    """Including weights, tables, the playground and py.typed."""
    with zipfile.ZipFile(wheel) as archive:
        assert not package_files() - set(archive.namelist())


@pytest.mark.slow
def test_sdist_contains_every_file(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not package_files() - names


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of a new environment with the wheel.

    Its dependencies are those of this environment, so nothing is downloaded.
    """
    tmp_path = tmp_path_factory.mktemp("installed")
    python = tmp_path / "env/bin/python"
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", *quiet)
    run(*pip, wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.mark.slow
def test_wheel_runs_in_a_new_environment(installed: Path, tmp_path: Path) -> None:
    shown = run(installed / "lockstep", "--version", cwd=tmp_path)
    assert shown == f"lockstep {lockstep.__version__}\n"
    where = run(installed / "python", "-c", "import lockstep; print(lockstep)", cwd=tmp_path)
    assert str(installed.parent) in where


@pytest.mark.slow
def test_wheel_generates_an_answer(installed: Path, tmp_path: Path) -> None:
    words = ("generate", "-p", "List the first 12 primes.", "--chat", "--temperature", "0")
    answer = run(installed / "lockstep", *words, cwd=tmp_path)
    assert answer.startswith("2, 3, 5, 7, 11")
