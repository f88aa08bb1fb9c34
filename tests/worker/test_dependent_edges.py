"""Choice between programmatic and full edges of a graph, without a GPU."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.worker import dependent_edges
from lockstep.worker.dependent_edges import (
    FULL,
    PROGRAMMATIC,
    RELEASE,
    WAIT,
    Edge,
    choose_edges,
    num_programmatic,
    start_early,
)

EDGE = Edge(1, 2, FULL)


class Graph:
    """Graph whose replays take a time for each kind of edges. calls: in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, edges: list[Edge]) -> None:
        self.calls: list[str] = []
        self.kind = FULL
        self.ms = {FULL: 1.0, PROGRAMMATIC: 0.5}
        monkeypatch.setattr(dependent_edges, "has_programmatic_edges", lambda: True)
        monkeypatch.setattr(dependent_edges, "dependent_edges", lambda graph: edges)
        monkeypatch.setattr(dependent_edges, "replay_ms", self.replay_ms)
        monkeypatch.setattr(dependent_edges, "set_edges", self.set_edges)

    def replay_ms(self, graph: Any) -> float:
        self.calls.append("replay")
        return self.ms[self.kind]

    def set_edges(self, graph: Any, edges: list[Edge], kind: tuple[int, int, int]) -> list[Edge]:
        self.calls.append("set")
        assert all(edge.kind == self.kind for edge in edges)
        self.kind = kind
        return [replace(edge, kind=kind) for edge in edges]


@pytest.mark.parametrize("edges", [[EDGE], []])
def test_ranks_replay_as_often_whatever_their_kernels_are(
    edges: list[Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of one rank alone would wait for the exchanges of the others."""
    graph = Graph(monkeypatch, edges)
    choose_edges(graph)  # type: ignore[arg-type]
    assert graph.calls.count("replay") == 2


@pytest.mark.parametrize(("ms", "kind"), [(0.5, PROGRAMMATIC), (2.0, FULL)])
def test_faster_kind_is_kept(
    ms: float, kind: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph(monkeypatch, [EDGE])
    graph.ms[PROGRAMMATIC] = ms
    choose_edges(graph)  # type: ignore[arg-type]
    assert graph.kind == kind


def test_graphs_stay_without_support_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers before CUDA 12.3 lack the functions for edges with data."""
    graph = Graph(monkeypatch, [EDGE])
    monkeypatch.undo()
    monkeypatch.setattr(dependent_edges.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dependent_edges, "sm_number", lambda device: 90)
    monkeypatch.setattr(dependent_edges, "_driver", object)
    choose_edges(graph)  # type: ignore[arg-type]
    start_early(graph)  # type: ignore[arg-type]
    assert num_programmatic(graph) == 0  # type: ignore[arg-type]


class Kernel:
    """Kernel with the caches of a JITFunction."""

    def __init__(self, specializations: list[Any]) -> None:
        self.device_caches = {0: (dict(enumerate(specializations)),)}


class ImportingName(str):
    """Name of a module during whose comparison another thread imports a module."""

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        sys.modules[f"imported_{len(sys.modules)}"] = ModuleType("imported")
        return super().startswith(prefix, *bounds)


def test_kernels_are_listed_while_other_threads_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton need not be installed: a module of its name defines what is looked up."""
    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(JITFunction=Kernel))
    monkeypatch.setattr(dependent_edges, "find_spec", lambda name: True)
    waiting = SimpleNamespace(function=1, asm={"ptx": f"{WAIT}; {RELEASE};"})
    plain = SimpleNamespace(function=2, asm={"ptx": "ret;"})
    unloaded = SimpleNamespace(function=None, asm={"ptx": WAIT})
    module: Any = ModuleType("kernels")
    module.kernel = Kernel([waiting, plain, unloaded])
    monkeypatch.setattr(sys, "modules", {ImportingName("lockstep.k"): module, **sys.modules})
    kernels = dependent_edges._loaded_kernels()
    assert kernels == [waiting, plain]
    assert dependent_edges._functions_with(WAIT, kernels) == {1}
