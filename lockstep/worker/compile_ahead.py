"""Compilation of the kernels of all steps before their first launch, in parallel processes.

A dry run of each step's shape gives the launches (dry_run.py). The kernels are compiled into
Triton's cache on disk, from which a process loads them at their first launch. A kernel that no dry
run launches is compiled at its first launch, so nothing here changes an answer.
"""

import logging
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import lockstep
from lockstep import __version__
from lockstep.child_processes import IGNORED_SIGNALS, blocked_signals, end_with_parent
from lockstep.config import EngineConfig, StepLimits
from lockstep.kernels.architecture import WARP_SIZE, Architecture
from lockstep.models.checkpoint import settings_files
from lockstep.progress import Progress
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.spec.options import FolderOptions
from lockstep.step import StepShape
from lockstep.worker.build import largest_prompt_step
from lockstep.worker.dry_run import dry
from lockstep.worker.memory_estimate import DryEngine
from lockstep.worker.step_shapes import (
    forced_shape,
    largest_forced_step,
    padded_prompt_step,
    shortest_prompt_step,
    uniform_shapes,
)

log = logging.getLogger("lockstep.engine")

WORK = "compiling"
"""Name of the work for progress bars."""
POLL_SECONDS = 0.1
"""Interval at which progress is shown."""
STALL_SECONDS = 120.0
"""Seconds without a compiled kernel after which the processes count as hung. A kernel took at most
10 s on the host of an H200."""
MAX_ERROR_CHARS = 500
"""Characters of an error that are kept. A pipe takes so few bytes whole or not at all, so a process
that is killed leaves no partial message."""


@dataclass(frozen=True)
class Compilation:
    """Specialization of a kernel. source: its ASTSource. options: of the compiler."""

    kernel: str
    source: Any
    target: Any
    options: dict[str, Any]

    def compile(self) -> None:
        """Compile it into Triton's cache on disk, unless the cache has it."""
        import triton

        triton.compile(self.source, target=self.target, options=self.options)


class PlannedDriver:
    """Driver of Triton for a GPU that may be absent: launches are specialized for it, none runs."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """Return the GPU that kernels are compiled for."""
        return self.target

    def get_current_device(self) -> str:
        """Return a name by which Triton keeps the kernels of this GPU apart."""
        return f"planned sm_{self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        """Return the stream of launches that do not run."""
        return 0


@contextmanager
def recording(card: Architecture) -> Iterator[dict[Any, Compilation]]:
    """Run the steps in the context dry, and give the specializations of kernels that they launch.

    card: architecture for which they are compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compilations: dict[Any, Compilation] = {}
    planned = PlannedDriver(GPUTarget("cuda", card.number, WARP_SIZE))
    run = JITFunction.run

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(kernel, *arguments, grid=grid, warmup=True, **options)

    # Triton calls it for each launch, since it returns no kernel that could be kept.
    def record(kernel: Any, key: str, signature: Any, device: str, *rest: Any) -> None:
        constants, options, attributes, _ = rest
        if (kernel, key) not in compilations:
            source = kernel.ASTSource(kernel, signature, constants, attributes)
            compilations[kernel, key] = Compilation(
                kernel.__name__, source, planned.target, options.__dict__
            )

    with (
        dry(card, launch),
        mock.patch.object(driver, "_active", planned),
        mock.patch.object(JITFunction, "_do_compile", record),
    ):
        yield compilations


def pass_shapes(limits: StepLimits) -> list[tuple[StepShape, ...]]:
    """Return the shapes of forward passes that launch every kernel of an engine with these limits.

    The order is that of a start, which compiles a kernel that is not in the cache when it launches
    it. KernelCompiler compiles the last kernels first, so that both seldom compile the same one.
    """
    forced = [forced_shape(limits, 1, window) for window in FORCED_WINDOWS]
    prompts = [largest_prompt_step(limits)[1], largest_forced_step(limits)]
    prompts += [padded_prompt_step(limits, tokens) for tokens in limits.prompt_buckets[:1]]
    uniform = uniform_shapes(limits)
    shapes = [*forced, *uniform, *prompts, shortest_prompt_step(limits)]
    return [(shape,) for shape in shapes] + [(uniform[0], prompts[0])]


def record_kernels(dry_engine: DryEngine, limits: StepLimits) -> list[Compilation]:
    """Return the specializations of kernels that an engine with these limits launches."""
    with dry_engine.mode, recording(dry_engine.card) as compilations:
        program = dry_engine.program(limits, dry_engine.build)
        for shapes in pass_shapes(limits):
            program.run(*shapes)
    return list(compilations.values())


def end_processes(processes: Sequence[BaseProcess]) -> None:
    """Kill processes, and wait for their ends."""
    for process in processes:
        process.kill()
        process.join()


class KernelCompiler:
    """Processes that compile kernels, the last one first. They end with this process.

    Each is a fork of this process, since a specialization cannot be pickled. It calls the compiler
    and writes to the cache, and does not use the GPU.
    """

    def __init__(self, compilations: Sequence[Compilation]) -> None:
        self._compilations = compilations
        self._context = multiprocessing.get_context("fork")
        self._remaining = self._context.Value("q", len(compilations))
        self._done = self._context.Value("q", 0)
        self._errors = self._context.SimpleQueue()
        self._read_errors: list[str] = []
        self._processes: list[BaseProcess] = []
        # Without it the processes of a start that failed would go on, in a process that lives on.
        self._end_processes = weakref.finalize(self, end_processes, self._processes)

    @property
    def _compiled(self) -> int:
        """Number of compiled kernels, read without the lock, which a killed process may hold."""
        return self._done.get_obj().value

    def start(self) -> None:
        """Start a process per core."""
        count = min(len(self._compilations), len(os.sched_getaffinity(0)))
        with blocked_signals():
            for _ in range(count):
                process = self._context.Process(
                    target=self._work, name="lockstep-compile", daemon=True
                )
                process.start()
                self._processes.append(process)

    def _work(self) -> None:
        """Compile until none remains."""
        # A compiler that hangs looks at nothing, and keeps open what it has of its parent's pipes:
        # whoever reads them would not notice that the parent was killed.
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which terminals send to a process group
        # multiprocessing sends it when the parent exits, and waits for the end of this process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
        parent = multiprocessing.parent_process()
        while parent is not None and parent.is_alive():
            with self._remaining.get_lock():
                self._remaining.value -= 1
                index = self._remaining.value
            if index < 0:
                return
            compilation = self._compilations[index]
            try:
                compilation.compile()
            except Exception as error:  # whatever the compiler raises
                text = str(error).strip().partition("\n")[0]
                line = f"{compilation.kernel}: {type(error).__name__}: {text}"
                self._errors.put(line[:MAX_ERROR_CHARS])
            with self._done.get_lock():
                self._done.value += 1

    def wait(self, progress: Progress) -> None:
        """Wait until all kernels are compiled, or none was for STALL_SECONDS.

        progress: called with (WORK, compiled kernels, all kernels).
        """
        shown = -1
        last = time.monotonic()
        while any(process.is_alive() for process in self._processes):
            compiled = self._compiled
            if compiled != shown:
                last = time.monotonic()
                shown = compiled
                progress(WORK, shown, len(self._compilations))
            self._drain_errors()
            if time.monotonic() - last > STALL_SECONDS:
                return
            time.sleep(POLL_SECONDS)
        progress(WORK, self._compiled, len(self._compilations))

    def close(self) -> list[str]:
        """End the processes -> one line per kernel that did not compile.

        Kernels that were not begun, or whose process ended early, are among them.
        """
        self._end_processes()
        self._drain_errors()
        errors = list(self._read_errors)
        missing = len(self._compilations) - self._compiled
        if missing:
            errors.append(f"kernels that were not compiled: {missing}")
        return errors

    def _drain_errors(self) -> None:
        """Read all errors that were sent. A full pipe would block the processes."""
        while not self._errors.empty():
            self._read_errors.append(self._errors.get())


class CompiledMark:
    """File in Triton's cache which says that the cache has all kernels of an engine.

    It is in the cache so that it is deleted and copied together with the kernels. Its name changes
    with the settings, with the files of the checkpoints that say how their models are built, and
    with the code.
    """

    def __init__(self, config: EngineConfig, limits: StepLimits, card: Architecture) -> None:
        import triton

        folders = [limits.model_path]
        if isinstance(config.speculative_config, FolderOptions):
            folders.append(config.speculative_config.folder)
        identity = (__version__, triton.__version__, card, limits, config, folders)
        hasher = sha256(repr(identity).encode())
        # A checkpoint may be replaced in place.
        settings = [path for folder in folders for path in settings_files(folder)]
        code = sorted(Path(lockstep.__path__[0]).rglob("*.py"))
        for path in (*settings, *code):
            hasher.update(path.read_bytes())
        self.path = kernel_cache() / f"lockstep-{hasher.hexdigest()[:16]}"

    def exists(self) -> bool:
        """Return whether the kernels were compiled."""
        return self.path.exists()

    def write(self) -> None:
        """Note that the kernels are compiled. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()


def kernel_cache() -> Path:
    """Return the folder of Triton's cache: TRITON_CACHE_DIR, or one in the home folder."""
    from triton import knobs

    return Path(knobs.cache.dir)


class StartCompiler:
    """Compilation of an engine's kernels while the engine loads its weights.

    make: returns the dry engine. It is called unless the cache has all kernels.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: StepLimits,
        card: Architecture,
        make: Callable[[], DryEngine],
    ) -> None:
        self._mark = CompiledMark(config, limits, card)
        self._compiler: KernelCompiler | None = None
        # A daemonic process may have no children: its kernels are compiled at their first launches.
        if self._mark.exists() or multiprocessing.current_process().daemon:
            return
        try:
            compiler = KernelCompiler(record_kernels(make(), limits))
            compiler.start()
        except Exception as error:
            # A start needs none of this: torch asserts what it cannot do dry, and recording uses
            # functions of Triton that change with its releases. What the user has to mend is raised
            # again when the engine is built.
            log.warning(
                "kernels are compiled one after the other, at their first launch: %s: %s",
                type(error).__name__,
                error,
            )
            return
        self._compiler = compiler

    def finish(self, progress: Progress) -> None:
        """Wait for the kernels that the start has not launched."""
        if self._compiler is None:
            return
        self._compiler.wait(progress)
        errors = self._compiler.close()
        self._compiler = None
        for error in errors:
            log.warning("a kernel was not compiled ahead of its first launch: %s", error)
        if errors:
            return
        with suppress(OSError):  # a cache that cannot be written: the next start looks again
            self._mark.write()
