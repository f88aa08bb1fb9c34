"""CUDA graph capture: functions that replay graphs, one per key.

The first call with a key runs eagerly, so that every kernel is compiled and every lazy buffer
exists, then records, and replays a few times to choose the kind of edges (dependent_edges.py).
Later calls replay. Tensor arguments are copied into the graph's own; results are the graph's own
tensors, overwritten by its next call. An op that no graph can replay raises an error that names the
op (capture_checks.py).
"""

import gc
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CaptureError
from lockstep.kernels.epochs import launch_epochs
from lockstep.step import ForwardContext
from lockstep.worker.capture_checks import (
    Fault,
    capture_checks,
    describe_fault,
    no_waiting,
    recover_capture,
)
from lockstep.worker.dependent_edges import MAX_TOKENS, choose_edges, num_programmatic, start_early
from lockstep.worker.program import RunStep

SYNC_ERROR = "synchronizing"
"""Word in torch's error about a forbidden synchronization."""


@dataclass
class Recording:
    """Recorded call: its graph, the tensors that it reads, and its result.

    inputs: per argument, the graph's tensor, or for a forward context the tuple of its token
    inputs; None for other arguments.
    """

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor | tuple[Tensor | None, ...] | None, ...]
    result: Any


class CapturedFunction:
    """Function with a graph per key, which is the shapes of its tensor arguments and the others.

    pool: memory pool of the graphs. captures: returns whether calls with a key are captured; other
    calls run eagerly. name: for error messages. starts_early: returns whether kernels of a call
    with a key may start early. Its graph then runs a few more times when it is made. Raises
    CaptureError where a call compiles a kernel, allocates outside of the pool, or waits for the
    device; the process stays usable.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        pool: Any,
        captures: Callable[[Hashable], bool],
        name: str,
        starts_early: Callable[[Any], bool] = lambda key: False,
    ) -> None:
        self.fn = fn
        self.pool = pool
        self.captures = captures
        self.name = name
        self.starts_early = starts_early
        self.choose_edges = choose_edges
        self.recordings: dict[Hashable, Recording] = {}

    def start_early(self) -> None:
        """Let kernels of all graphs that may start early do so, whatever is faster: for checks."""
        self.choose_edges = start_early
        for key, recording in self.recordings.items():
            if self.starts_early(key):
                start_early(recording.graph)

    @property
    def has_early_starts(self) -> bool:
        """Return whether kernels of a graph start before the previous one ends."""
        short = (one.graph for key, one in self.recordings.items() if self.starts_early(key))
        return any(map(num_programmatic, short))

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(map(_key_of, arguments))
        if not self.captures(key):
            return self.fn(*arguments)
        recording = self.recordings.get(key)
        if recording is None:
            recording = self._record(key, arguments)
            self.recordings[key] = recording
        for graph_input, argument in zip(recording.inputs, arguments, strict=True):
            if isinstance(graph_input, Tensor):
                graph_input.copy_(argument)
            elif graph_input is not None:
                for token_input, value in zip(graph_input, argument.token_inputs, strict=True):
                    if token_input is not None:
                        token_input.copy_(value)
        recording.graph.replay()
        return recording.result

    def _record(self, key: Hashable, arguments: tuple[Any, ...]) -> Recording:
        """Run the function eagerly on clones of the arguments, then capture the same call."""
        graph_arguments = tuple(map(_clone, arguments))
        epochs = launch_epochs(torch.device("cuda", torch.cuda.current_device()))
        self._run_eagerly(key, graph_arguments)
        stream = torch.cuda.current_stream()
        starts_early = self.starts_early(key)
        graph = torch.cuda.CUDAGraph(keep_graph=starts_early)
        result = None
        fault: RuntimeError | None = None
        try:
            with no_garbage_collection(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # the fault came first
                with torch.cuda.graph(graph, pool=self.pool):
                    try:
                        with capture_checks(self.pool):
                            epochs.advance()  # each replay has new epochs
                            result = self.fn(*graph_arguments)
                    except RuntimeError as error:
                        fault = error
        except RuntimeError as error:
            fault = fault or error
            recover_capture(stream, self.pool)
        if fault is not None:
            raise self._error(key, fault) from fault
        if starts_early:
            try:
                self.choose_edges(graph)
            except RuntimeError as error:
                raise self._error(key, error) from error
        return Recording(graph, tuple(map(_inputs_of, graph_arguments)), result)

    def _run_eagerly(self, key: Hashable, arguments: tuple[Any, ...]) -> None:
        """Call the function once outside of the default stream, as the capture will, to compile
        it.
        """
        warm_up_stream = _warm_up_stream(torch.cuda.current_device())
        warm_up_stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(warm_up_stream), no_waiting():
                self.fn(*arguments)
        except RuntimeError as error:
            if SYNC_ERROR in str(error):
                raise self._error(key, error) from error
            raise
        torch.cuda.current_stream().wait_stream(warm_up_stream)

    def _error(self, key: Hashable, error: RuntimeError) -> CaptureError:
        fault = str(error).partition("\n")[0]
        if not isinstance(error, Fault):
            fault = f"waits for the device: {fault}" if SYNC_ERROR in fault else f"fails: {fault}"
        return CaptureError(
            f"capture of {self.name} at {key}: {describe_fault(error)} {fault}. "
            "Run with cuda_graph_mode='none' to serve meanwhile, and report this."
        )


def _key_of(argument: Any) -> Hashable:
    """Return what a graph depends on: shapes of tensors, and which optional inputs a pass has."""
    if isinstance(argument, ForwardContext):
        inputs = argument.token_inputs
        return tuple(None if tensor is None else tuple(tensor.shape) for tensor in inputs)
    return tuple(argument.shape) if isinstance(argument, Tensor) else argument


def _clone(argument: Any) -> Any:
    """Return the argument with cloned tensors, into which each call copies.

    A captured piece reads only the optional inputs of a forward context, so only these are cloned.
    """
    if isinstance(argument, ForwardContext):
        inputs = argument.token_inputs
        copies = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
        return argument.with_token_inputs(copies)
    return argument.clone() if isinstance(argument, Tensor) else argument


def _inputs_of(argument: Any) -> Tensor | tuple[Tensor | None, ...] | None:
    """Return the tensors of a recorded argument into which later calls copy."""
    if isinstance(argument, ForwardContext):
        # Not the context: that would keep all other tensors of the first pass allocated.
        return argument.token_inputs
    return argument if isinstance(argument, Tensor) else None


@cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all calls before a capture on a device.

    cuBLAS keeps a workspace of 32 MiB for every stream that it has run on: one stream for each of 8
    graphs took 258 MB outside of the planned memory (H200, 2026-11-28).
    """
    return torch.cuda.Stream(device)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection: destroying an older engine's graphs would end a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def capture_program(run_step: RunStep, pool: Any) -> RunStep:
    """Return run_step with a graph per forward pass, and one of decide for each of its steps.

    A pass with a step that is not captured runs eagerly.
    """

    def is_captured(shapes: Any) -> bool:
        return all(shape.is_captured for shape in shapes)

    def follows_captured(key: Any) -> bool:
        # After an eager pass the arguments are new tensors, which no graph reads.
        return is_captured(key[0].shapes)

    def is_short(shapes: Any) -> bool:
        return sum(shape.tokens for shape in shapes) <= MAX_TOKENS

    def follows_short(key: Any) -> bool:
        return is_short(key[0].shapes)

    return RunStep(
        CapturedFunction(run_step.forward, pool, is_captured, "forward", is_short),
        CapturedFunction(run_step.decide, pool, follows_captured, "decide", follows_short),
    )


def captured_halves(run_step: RunStep) -> list[CapturedFunction]:
    """Return the halves of a step that have graphs."""
    return [half for half in run_step if isinstance(half, CapturedFunction)]


def capture_pieces(model: nn.Module, pool: Any, token_counts: Iterable[int]) -> None:
    """Capture everything in the blocks except mixers, at these numbers of tokens."""
    counts = frozenset(token_counts)

    def has_captured_count(key: Any) -> bool:
        return key[0][0] in counts

    for name, block in model.named_modules():
        if hasattr(block, "tokenwise"):
            block.tokenwise = CapturedFunction(
                block.tokenwise, pool, has_captured_count, f"{name}.tokenwise"
            )
