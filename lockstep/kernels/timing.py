"""Time per call, measured over a chain of calls on distinct inputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
REPEATS = {"cuda": 20, "cpu": 5}
"""Number of measured runs of a chain, by device type."""
WARM_REPLAYS = 3
"""Replays before the first measured one: GPU clocks rise under load."""


def seconds_per_call(
    calls: Sequence[Call],
    device: str,
    repeats: int,
    pick: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Return the median seconds per call over `repeats` runs of a chain of calls.

    pick: another statistic than the median. On a GPU the chain is one CUDA graph timed by events,
    so launch overhead does not count.
    """
    # The first run compiles every kernel: nothing may be compiled while a graph is captured.
    for call in calls:
        call()
    times = _time_on_cpu(calls, repeats) if device == "cpu" else _time_replays(calls, repeats)
    return pick(times) / len(calls)


def record_graph(call: Call) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call in a CUDA graph. Its kernels must be compiled already.

    Returns the graph and the call's result, i.e. the buffers that each replay fills.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def _time_replays(calls: Sequence[Call], repeats: int) -> list[float]:
    """Return the seconds of each replay of the chain's CUDA graph."""

    def chain() -> None:
        for call in calls:
            call()

    graph, _ = record_graph(chain)
    for _ in range(WARM_REPLAYS):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def _time_on_cpu(calls: Sequence[Call], repeats: int) -> list[float]:
    """Return the seconds of each run of the chain on the CPU."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - started)
    return times
