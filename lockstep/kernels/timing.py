"""How long one call takes, measured over a chain of calls on distinct inputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
REPEATS = {"cuda": 20, "cpu": 5}
"""Runs of a chain that a benchmark measures."""
WARM_REPLAYS = 3
"""Replays before the first that counts: clocks rise under load."""


def seconds_per_call(
    calls: Sequence[Call],
    device: str,
    repeats: int,
    pick: Callable[[list[float]], float] = statistics.median,
) -> float:
    """The median, or what `pick` says, over `repeats` runs of the chain, divided by its calls.

    On a GPU the chain is one CUDA graph, so that no launch is waited for, timed by events. It runs
    once before it is recorded, so that every kernel is compiled.
    """
    for call in calls:
        call()
    times = _on_cpu(calls, repeats) if device == "cpu" else _replayed(calls, repeats)
    return pick(times) / len(calls)


def recorded(call: Call) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A call whose kernels are compiled, as a CUDA graph, and what it returned: the buffers that a
    replay fills."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def _replayed(calls: Sequence[Call], repeats: int) -> list[float]:
    """Seconds of each replay of the chain."""

    def chain() -> None:
        for call in calls:
            call()

    graph, _ = recorded(chain)
    for _ in range(WARM_REPLAYS):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]


def _on_cpu(calls: Sequence[Call], repeats: int) -> list[float]:
    """Seconds of each run of the chain."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - started)
    return times
