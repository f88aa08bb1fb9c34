"""Kernels are recorded from dry runs, compiled in parallel, and errors are reported."""

import gc
import json
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.kernels.architecture import Architecture, architecture_by_name
from lockstep.worker import compile_ahead
from lockstep.worker.compile_ahead import WORK, KernelCompiler
from tests.forked_processes import ForkedProgram

RECORD = """
import json
from lockstep.config import EngineConfig
from lockstep.kernels.architecture import architecture_by_name
from lockstep.kernels.backends import load
from lockstep.models.checkpoint import Checkpoint
from lockstep.worker.build import find_model, sized, step_limits
from lockstep.worker.compile_ahead import record_kernels
from lockstep.worker.memory_estimate import DryEngine

load()
card = architecture_by_name("sm_90")
config = EngineConfig.read()
checkpoint = Checkpoint.read(find_model(None))
limits = step_limits(config, checkpoint, "cuda", None, assumed_numerics=card.name)
limits = sized(limits, config, 2, 256)
recorded = record_kernels(DryEngine(config, checkpoint, limits, None, card, False), limits)
small = next(one for one in recorded if one.kernel == "silu_mul_kernel")
small.compile()
# Launches of one source may differ in warps and stages alone.
hashes = [one.source.hash() + repr(one.options) for one in recorded]
pairs = zip(recorded, hashes, strict=True)
print(json.dumps([[one.kernel, one.target.arch, hashed] for one, hashed in pairs]))
"""
ENDS = """
import os
import signal
from pathlib import Path
from lockstep.worker.compile_ahead import KernelCompiler
from tests.worker.test_compile_ahead import Work

compiler = KernelCompiler([Work(f"kernel_{i}", Path(), "hangs") for i in range(2)])
compiler.start()
"""
STEP_KERNELS = {
    "dense_gemm_kernel", "recurrent_step_kernel", "_attention_kernel",
    "add_rms_norm_kernel", "_rope_and_cache_kernel", "score_kernel", "choose_kernel",
    "prepare_step_kernel", "advance_rows_kernel",
}  # fmt: skip
"""Kernels of every step of the bundled model, or of every prompt."""


@dataclass(frozen=True)
class Work:
    """Compilation whose compiler writes a file, raises, hangs, or ends its process."""

    kernel: str
    path: Path
    fault: str = ""

    def compile(self) -> None:
        if self.fault == "raises":
            raise RuntimeError("out of registers\nat line 3")
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hangs":
            signal.pause()
        self.path.write_text(self.kernel)


def run(works: list[Work]) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Compile -> (errors, calls of progress)."""
    shown: list[tuple[str, int, int]] = []
    compiler = KernelCompiler(works)  # type: ignore[arg-type]
    compiler.start()
    compiler.wait(lambda *call: shown.append(call))
    return compiler.close(), shown


def test_kernels_of_every_step_are_recorded_without_a_gpu(
    tmp_path: Path,
) -> None:
    code = f"import os; os.environ['TRITON_CACHE_DIR'] = {str(tmp_path)!r}\n{RECORD}"
    program = ForkedProgram(code, [])
    out, errors = program.communicate(timeout=120.0)
    assert not program.returncode, errors
    recorded = [tuple(one) for one in json.loads(out)]
    assert {kernel for kernel, _, _ in recorded} >= STEP_KERNELS
    assert {arch for _, arch, _ in recorded} == {90}
    assert len(set(recorded)) == len(recorded), "each specialization once"
    assert list(tmp_path.rglob("silu_mul_kernel.cubin"))


def test_all_kernels_are_compiled(tmp_path: Path) -> None:
    works = [Work(f"kernel_{i}", tmp_path / str(i)) for i in range(50)]
    errors, shown = run(works)
    assert not errors and shown[-1] == (WORK, 50, 50)
    assert all((tmp_path / str(i)).read_text() == f"kernel_{i}" for i in range(50))


def test_error_of_the_compiler_names_its_kernel_and_ends_no_other(tmp_path: Path) -> None:
    works = [Work(f"kernel_{i}", tmp_path / str(i), "raises" * (i == 3)) for i in range(9)]
    errors, _ = run(works)
    assert errors == ["kernel_3: RuntimeError: out of registers"]
    assert len(list(tmp_path.iterdir())) == 8


def test_errors_of_many_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors are more than an unread pipe can buffer."""
    monkeypatch.setattr("lockstep.worker.compile_ahead.STALL_SECONDS", 1.0)
    works = [Work(f"kernel_{i:0200d}", Path(), "raises") for i in range(1000)]
    errors, _ = run(works)
    assert len(errors) == 1000 and all("out of registers" in error for error in errors)


def test_kernels_of_a_process_that_died_are_missing(tmp_path: Path) -> None:
    works = [Work(f"kernel_{i}", tmp_path / str(i), "dies") for i in range(9)]
    errors, _ = run(works)
    assert errors == ["kernels that were not compiled: 9"]


def test_lock_of_a_killed_process_blocks_no_other_process() -> None:
    compiler = KernelCompiler([Work("kernel", Path())])  # type: ignore[list-item]
    compiler._done.get_lock().acquire()
    errors: list[str] = []
    closing = Thread(target=lambda: errors.extend(compiler.close()), daemon=True)
    closing.start()
    closing.join(5.0)
    assert errors == ["kernels that were not compiled: 1"]


def test_hung_compiler_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.worker.compile_ahead.STALL_SECONDS", 0.5)
    works = [Work(f"kernel_{i}", tmp_path / str(i), "hangs" * (i == 3)) for i in range(9)]
    errors, _ = run(works)
    assert errors == ["kernels that were not compiled: 1"]
    assert len(list(tmp_path.iterdir())) == 8


def test_processes_end_with_the_one_that_started_them() -> None:
    """An engine that cannot load its model ends at once, and waits for no kernel."""
    program = ForkedProgram(ENDS, [])
    _, errors = program.communicate(timeout=30.0)
    assert not program.returncode, errors


def test_hung_compilers_end_with_a_process_that_is_killed() -> None:
    """They hold its end of a pipe open."""
    program = ForkedProgram(ENDS + "os.kill(os.getpid(), signal.SIGKILL)", [])
    with program.stdout, program.stderr:
        assert wait([program.stdout], timeout=30.0), "a compiler holds it"
        assert not program.stdout.read()


def test_compilers_of_a_start_that_failed_are_ended(tmp_path: Path) -> None:
    compiler = KernelCompiler([Work("kernel", tmp_path / "0", "hangs")])  # type: ignore[list-item]
    compiler.start()
    (process,) = compiler._processes
    assert process.is_alive()
    del compiler
    gc.collect()
    assert not process.is_alive()


def test_no_kernel_is_no_work() -> None:
    assert run([]) == ([], [(WORK, 0, 0)])


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, without a kernel."""
    pytest.importorskip("triton")
    monkeypatch.setattr(compile_ahead, "kernel_cache", lambda: tmp_path)
    return tmp_path


def arguments_of(model: Path, draft: Path | None = None) -> tuple[Any, Any, Architecture]:
    """Return the settings, limits and GPU of an engine with these checkpoints."""
    drafting = None if draft is None else {"method": "draft_model", "model": str(draft)}
    config = EngineConfig.read(model=str(model), speculative_config=drafting)
    return config, SimpleNamespace(model_path=model), architecture_by_name("sm_90")


def mark(model: Path, draft: Path | None = None) -> compile_ahead.CompiledMark:
    return compile_ahead.CompiledMark(*arguments_of(model, draft))


def test_engine_starts_in_a_process_that_may_have_no_children(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemonic worker of a task queue is such a process."""
    work = Work("kernel", empty_cache / "kernel")
    monkeypatch.setattr(compile_ahead, "record_kernels", lambda *arguments: [work])
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    unused: Any = None
    start = compile_ahead.StartCompiler(*arguments_of(empty_cache), lambda: unused)
    start.finish(lambda *call: None)
    assert not list(empty_cache.iterdir())


def test_engine_starts_where_kernels_cannot_be_recorded(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release of Triton may have functions with other arguments."""

    def record(*arguments: object) -> None:
        raise TypeError("record() takes 4 arguments")

    monkeypatch.setattr(compile_ahead, "record_kernels", record)
    unused: Any = None
    compile_ahead.StartCompiler(*arguments_of(empty_cache), lambda: unused).finish(unused)
    assert "at their first launch: TypeError: record() takes" in caplog.text
    assert not list(empty_cache.iterdir())


def test_mark_is_of_one_release_of_triton(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark(empty_cache).write()
    assert mark(empty_cache).exists()
    monkeypatch.setattr("triton.__version__", "9.9.9")
    assert not mark(empty_cache).exists()


@pytest.mark.parametrize("replaced", ["model", "draft"])
@pytest.mark.parametrize("name", ["config.json", "quantize_config.json"])
def test_mark_is_not_of_a_checkpoint_that_was_replaced_in_place(
    empty_cache: Path, tmp_path_factory: pytest.TempPathFactory, replaced: str, name: str
) -> None:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("model", "draft")}
    mark(**folders).write()
    assert mark(**folders).exists()
    (folders[replaced] / name).write_text("{}")
    assert not mark(**folders).exists()
