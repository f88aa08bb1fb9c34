"""Checks during capture: forbidden operations raise at their own line.

A replay repeats kernels on the memory that they were recorded with, and nothing else. Compiling a
kernel, allocating outside of the graph's pool or waiting for the device would happen at the
recording only, and replays would be wrong.
"""

import ctypes
import linecache
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.kernels import Op

LIBRARIES = ("torch", "triton", "contextlib", "ctypes", __name__, "lockstep.worker.dry_run")
"""Modules whose frames do not show the faulty line of a step."""
PACKAGE = Path(__file__).parents[1]


class Fault(RuntimeError):
    """Operation that no graph can repeat. The message is a verb with its object."""


@contextmanager
def capture_checks(pool: Any) -> Iterator[None]:
    """Raise at the line of a forbidden operation while a step is recorded into this pool."""
    with no_compiling(), no_waiting(), OwnMemory(pool, torch.cuda.current_stream()):
        yield


@contextmanager
def no_compiling() -> Iterator[None]:
    """Make Triton raise Fault instead of compiling; compiled kernels run."""
    with ExitStack() as stack:
        if find_spec("triton"):
            from triton import knobs

            def refuse(*, fn: Any, **_: Any) -> None:
                raise Fault(f"compiles the kernel {fn.name}")

            stack.callback(setattr, knobs.runtime, "jit_cache_hook", knobs.runtime.jit_cache_hook)
            knobs.runtime.jit_cache_hook = refuse
        yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise instead of waiting for the device, in .item(), .cpu(), nonzero and the like.

    torch.cuda.synchronize() is not covered; CUDA refuses it itself during a capture.
    """
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(2)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype, once
        torch.cuda.set_sync_debug_mode(mode)


class OwnMemory(TorchDispatchMode):
    """Raises Fault where a torch op's new result is outside of a graph's pool.

    Memory of other streams and of the host may be reused while the graph still needs it, and work
    on another stream is not recorded. A number on the host (a 0-dim tensor) becomes a kernel
    argument and is allowed.
    """

    def __init__(self, pool: Any, stream: Any) -> None:
        super().__init__()
        self.pool = pool
        self.stream = stream
        self.spans: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.stream is not None and torch.cuda.current_stream() != self.stream:
            raise Fault("runs on a stream outside of the recorded one, on memory of that stream")
        out = func(*args, **(kwargs or {}))
        inputs = {address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and address(result) not in inputs:
                self._check(result)
        return out

    def _check(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        at = address(tensor)
        if size == 0 or (tensor.device.type == "cpu" and tensor.dim() == 0):
            return
        if tensor.device.type != "cuda" or not (self._owns(at) or self._owns(at, look=True)):
            raise Fault(f"takes {size:,} bytes on {tensor.device} outside of the graph's pool")

    def _owns(self, at: int, look: bool = False) -> bool:
        if look:
            segments = segments_of(self.pool)
            self.spans = [(s["address"], s["address"] + s["total_size"]) for s in segments]
        return any(begin <= at < end for begin, end in self.spans)


def segments_of(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the memory segments of a graph's pool.

    torch returns references to the numbers of the pool's id without taking them (2.11;
    github.com/pytorch/pytorch/pull/196366). Numbers above 256 are then freed while in use, and the
    process crashes some time after its 257th pool. So each gets one more reference here.
    """
    for number in pool:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    return torch.cuda.memory_snapshot(pool)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def describe_fault(error: BaseException) -> str:
    """Return which op and line raised an error, as far as the frames show.

    `op linear of blocks.3.mlp.down (kernels/linear/triton.py:188 in launch: out = x.item())`
    """
    frames = list(walk_tb(error.__traceback__))
    step_frames = [pair for pair in frames if not _of_library(pair[0])] or frames
    frame, line = step_frames[-1]
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
    source = linecache.getline(str(path), line).strip()
    who = next((f"op {name}" for f, _ in frames if (name := _op(f))), frame.f_code.co_qualname)
    layer = _layer([f for f, _ in frames])
    of = f" of {layer}" if layer else ""
    return f"{who}{of} ({shown}:{line} in {frame.f_code.co_name}: {source})"


def _of_library(frame: FrameType) -> bool:
    """Return whether a frame belongs to LIBRARIES."""
    name = str(frame.f_globals.get("__name__", ""))
    return any(name == library or name.startswith(library + ".") for library in LIBRARIES)


def _op(frame: FrameType) -> str | None:
    """Return the op whose backend this frame runs: a backend's file imports its op."""
    code: CodeType = frame.f_code
    for value in list(frame.f_globals.values()):
        if isinstance(value, Op):
            bodies = (backend.run for backend in value.backends.values())
            if any(getattr(fn, "__code__", None) is code for fn in bodies):
                return value.name
    return None


def _layer(frames: list[FrameType]) -> str | None:
    """Return the innermost running module, by its name in the outermost one."""
    running = [m for f in frames if isinstance(m := f.f_locals.get("self"), nn.Module)]
    if not running:
        return None
    return next((n for n, m in running[0].named_modules() if m is running[-1]), None) or None


def recover_capture(stream: Any, pool: Any) -> None:
    """Clean up after a capture that CUDA aborted, where torch leaves its own end out.

    Otherwise the capture's stream stays current, its pool stays open, and the random generator
    raises at its next use. No other graph can be recorded into that pool.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # where this torch had closed it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # the end of a whole one frees the generator
        torch.zeros(1, device=stream.device)
