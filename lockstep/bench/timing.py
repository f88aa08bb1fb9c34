"""How long one call takes, measured over a chain of calls on distinct inputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
REPEATS = {"cuda": 20, "cpu": 5}


def seconds_per_call(calls: Sequence[Call], device: str, repeats: int) -> float:
    """The median over `repeats` runs of the chain, divided by its calls.

    On a GPU the chain is one CUDA graph, so that no launch is waited for, timed by events.
    """
    if device == "cpu":
        return _on_cpu(calls, repeats)
    graph = _recorded(calls)
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    return statistics.median(times) / 1e3 / len(calls)


def _recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The chain as a graph. It runs once before, so that every kernel is compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _on_cpu(calls: Sequence[Call], repeats: int) -> float:
    for call in calls:
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / len(calls)
