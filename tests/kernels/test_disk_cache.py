"""Machine code on disk: what its names depend on, locks between processes, and broken folders."""

import ast
import errno
import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from numba.core import config

import lockstep.kernels
from lockstep.kernels.simd import compiler, disk_cache
from tests.forked_processes import ForkedProgram

PACKAGE = Path(lockstep.kernels.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder of machine code, which kernels of a test use."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    disk_cache.cache_folder.cache_clear()
    disk_cache._warn_once.cache_clear()
    folder = disk_cache.cache_folder()
    assert folder is not None and folder.is_relative_to(tmp_path)
    yield folder
    disk_cache.cache_folder.cache_clear()


def make_double() -> Any:
    """Return a kernel that is not compiled yet."""

    @compiler.kernel
    def double(x):
        return 2 * x

    return double


def files_of(folder: Path) -> list[Path]:
    """Return the files of machine code."""
    return sorted(folder.glob("*.machine_code"))


def misses(kernel: Any) -> int:
    """Return how often a kernel was compiled."""
    return sum(kernel.stats.cache_misses.values())


def names_in(node: ast.AST) -> set[str]:
    """Return the names of variables that a function reads, and of modules whose members it does."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def test_sources_of_inlined_functions_and_constants_are_hashed() -> None:
    """A kernel must not read a name from a file whose edits leave old machine code in use."""
    hashed = {file for pattern in disk_cache.INLINED for file in PACKAGE.glob(pattern)}
    kernels = 0
    for file in PACKAGE.rglob("*.py"):
        if "simd.compiler import" not in file.read_text():
            continue
        tree = ast.parse(file.read_text())
        modules = {
            alias.asname or alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            if not {"kernel", "inline"} & {d.id for d in node.decorator_list if hasattr(d, "id")}:
                continue
            kernels += 1
            for module in {modules[name] for name in names_in(node) & set(modules)}:
                source = PACKAGE.parents[1].joinpath(*module.split(".")).with_suffix(".py")
                assert source in hashed, (file, node.name, module)
    assert kernels > 50


def test_hash_depends_on_an_inlined_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simd = tmp_path / "kernels" / "simd"
    simd.mkdir(parents=True)
    monkeypatch.setattr(disk_cache, "__file__", str(simd / "disk_cache.py"))
    hashes = []
    for text in ("a = 1\n", "a = 1\n", "a = 2\n"):
        (simd / "vectors.py").write_text(text)
        hashes.append(disk_cache.source_hash.__wrapped__())
    assert hashes[0] == hashes[1] != hashes[2]


CALLS_A_KERNEL = """
import os
import sys
import time
from pathlib import Path

from numba.core import config
from lockstep.kernels.simd import disk_cache

cache, module, seconds, processes, max_wait = sys.argv[1:]
config.CACHE_DIR = cache
disk_cache.cache_folder.cache_clear()
disk_cache.MAX_WAIT = float(max_wait)
sys.path.insert(0, module)
from kernel_of_processes import double

compile_double = double._compiler.compile


def compile_slowly(*arguments):
    print("compiles")
    time.sleep(float(seconds))  # so that others come meanwhile
    return compile_double(*arguments)


double._compiler.compile = compile_slowly
Path(cache).mkdir(exist_ok=True)
(Path(cache) / f"ready_{os.getpid()}").touch()
while len(list(Path(cache).glob("ready_*"))) < int(processes):
    time.sleep(0.01)
assert double(21) == 42
print(sum(double.stats.cache_misses.values()), sum(double.stats.cache_hits.values()))
"""
KERNEL_OF_PROCESSES = (
    "from lockstep.kernels.simd.compiler import kernel\n@kernel\ndef double(x):\n    return 2 * x\n"
)


def start(
    tmp_path: Path,
    seconds: float = 0.0,
    processes: int = 1,
    max_wait: float = 60.0,
    code: str = CALLS_A_KERNEL,
) -> ForkedProgram:
    """Start a process that calls a kernel; all share one cache.

    seconds: that compilation takes. processes: that wait for each other first.
    """
    (tmp_path / "kernel_of_processes.py").write_text(KERNEL_OF_PROCESSES)
    arguments = [tmp_path / "cache", tmp_path, seconds, processes, max_wait]
    return ForkedProgram(code, list(map(str, arguments)))


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    """The second process loads what the first one keeps."""
    programs = [start(tmp_path, seconds=1.0, processes=2) for _ in range(2)]
    outputs = [program.communicate() for program in programs]
    assert sorted(outputs) == [("0 1\n", ""), ("compiles\n1 0\n", "")]


def load_double(folder: Path, text: str) -> Any:
    """Write a module into a folder, and return its kernel."""
    folder.mkdir(exist_ok=True)
    path = folder / "kernel_of_processes.py"
    path.write_text(text)
    spec = spec_from_file_location("kernel_of_processes", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def test_copies_of_a_source_share_machine_code(folder: Path, tmp_path: Path) -> None:
    """Neither the folder nor the file's time matters, but its contents do."""
    changed = KERNEL_OF_PROCESSES.replace("2 * x", "x + x + 0")
    cases = (
        ("a", KERNEL_OF_PROCESSES, 1),
        ("b", KERNEL_OF_PROCESSES, 0),
        ("b", changed, 1),
        ("a", KERNEL_OF_PROCESSES, 0),
    )
    for clone, text, expected in cases:
        double = load_double(tmp_path / clone, text)
        assert double(21) == 42 and misses(double) == expected, (clone, text)


def test_numbas_own_places_are_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They know a file's time and nothing of inlined files, so old machine code would be used."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "InTreeCacheLocator", raising=False)
    for clone in ("a", "b"):
        double = load_double(tmp_path / clone, KERNEL_OF_PROCESSES)
        assert double(21) == 42 and misses(double) == (clone == "a")
    assert len(files_of(folder)) == 1 and not list(tmp_path.glob("*/__pycache__/*.nb?"))


def test_killed_compiler_leaves_no_lock(tmp_path: Path) -> None:
    killed = start(tmp_path, seconds=100.0)
    assert killed.stdout.readline() == "compiles\n"
    killed.kill()
    killed.communicate()
    begin = time.monotonic()
    assert start(tmp_path).communicate() == ("compiles\n1 0\n", "")
    assert time.monotonic() - begin < 30


def test_stopped_compiler_delays_others_by_a_bound(tmp_path: Path) -> None:
    """They compile themselves and log it. The stopped process goes on later."""
    stopped = start(tmp_path, seconds=2.0)  # it must not end before the signal arrives
    assert stopped.stdout.readline() == "compiles\n"
    stopped.send_signal(signal.SIGSTOP)
    try:
        out, errors = start(tmp_path, max_wait=0.3).communicate()
        assert out == "compiles\n1 0\n" and "Another process has been compiling" in errors
        # What the second process kept is loaded without a lock.
        assert start(tmp_path).communicate() == ("0 1\n", "")
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate() == ("1 0\n", "")


def test_kernels_of_one_factory_may_call_each_other(folder: Path) -> None:
    """Compilation of one compiles the other, in two threads at once."""

    def make(inner: Any) -> Any:
        if inner is None:
            return make_double()

        @compiler.kernel
        def outer(x):
            return inner(x) + 1

        return outer

    inner = make(None)
    middle = make(inner)
    outer = make(middle)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(kernel, 20) for kernel in (outer, inner, middle)]
        assert [future.result(timeout=60) for future in futures] == [42, 40, 41]
    assert len(files_of(folder)) == 3
    # No lock is left.
    for path in folder.glob("*.lock"):
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_damaged_file_is_compiled_anew(folder: Path) -> None:
    make_double()(4)
    (path,) = files_of(folder)
    intact = path.read_bytes()
    for damaged in (b"", intact[:-100], intact[:500] + bytes([intact[500] ^ 1]) + intact[501:]):
        path.write_bytes(damaged)
        kernel = make_double()
        assert kernel(4) == 8 and misses(kernel) == 1
        assert path.stat().st_size > 100
        kernel = make_double()
        assert kernel(4) == 8 and misses(kernel) == 0


def test_other_users_may_read_files(folder: Path) -> None:
    """An image for containers is built by root, and run by another user."""
    mask = os.umask(0o022)
    try:
        make_double()(4)
    finally:
        os.umask(mask)
    (path,) = files_of(folder)
    assert path.stat().st_mode & 0o777 == 0o644


def test_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert make_double()(4) == 8 and len(files_of(folder)) == 1


def test_folder_that_cannot_be_written(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel is compiled and runs; one warning says what to do."""
    shutil.rmtree(folder)
    folder.touch()
    with caplog.at_level(logging.WARNING, "lockstep.kernels"):
        assert make_double()(4) == 8
        assert make_double()(4.0) == 8
    (record,) = caplog.records
    assert str(folder) in record.message and "NUMBA_CACHE_DIR" in record.message


def test_folder_that_can_only_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code in an image for containers is loaded."""
    make_double()(4)
    monkeypatch.setattr(disk_cache, "_make_writable", lambda folder: False)
    disk_cache.cache_folder.cache_clear()
    assert disk_cache.cache_folder() == folder
    kernel = make_double()
    assert kernel(4) == 8 and misses(kernel) == 0


def test_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_make_writable", lambda folder: False)
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    disk_cache.cache_folder.cache_clear()
    assert disk_cache.cache_folder() is None
    assert make_double()(4) == 8 and not files_of(folder)


FILLS_THE_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""
"""Writing more than 1,000 bytes to a file fails."""


def test_full_disk(tmp_path: Path) -> None:
    """No part of a file stays."""
    out, errors = start(tmp_path, code=FILLS_THE_DISK + CALLS_A_KERNEL).communicate()
    assert out == "compiles\n1 0\n" and "Compiled kernels cannot be kept in" in errors
    files = [path for path in (tmp_path / "cache" / "lockstep").rglob("*") if path.is_file()]
    assert [path.suffix for path in files] == [".lock"]


def test_unused_folders_are_deleted(folder: Path) -> None:
    """Machine code of other sources goes after UNUSED_DAYS, when new sources make a folder."""
    ages = (0, 29, 31)
    neighbours = [folder.parent / f"days_{age}" for age in ages]
    for age, neighbour in zip(ages, neighbours, strict=True):
        neighbour.mkdir()
        (neighbour / "double.machine_code").touch()
        used = time.time() - age * 24 * 3600
        os.utime(neighbour, (used, used))
    assert disk_cache._make_writable(folder)
    assert all(neighbour.exists() for neighbour in neighbours)
    assert disk_cache._make_writable(folder.parent / "new")
    assert [neighbour.exists() for neighbour in neighbours] == [True, True, False]
