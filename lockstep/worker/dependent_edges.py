"""Edges of CUDA graphs over which a kernel starts while the previous one ends.

CUDA calls this programmatic dependent launch, and such edges programmatic. Over a full edge the GPU
is idle for about a microsecond. Over a programmatic edge the next kernel is launched once all CTAs
of the previous one allow it. An instruction in the kernel waits for the end of the previous one
(kernels/device/dependent_launch.py). Kernels without this instruction keep full edges, so an edge
never changes what a kernel reads.
"""

import ctypes
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from lockstep.kernels.architecture import HOPPER, sm_number
from lockstep.worker.step_timer import StepTimer

WAIT = "griddepcontrol.wait"
"""PTX instruction that waits for the end of the previous kernel."""
RELEASE = "griddepcontrol.launch_dependents"
"""PTX instruction that lets the next kernel start."""
KERNEL_NODE = 0
"""CU_GRAPH_NODE_TYPE_KERNEL."""
MAX_TOKENS = 128
"""Maximum tokens of graphs with programmatic edges.

On an H200 an edge gains about 0.5 us. Of a step of Qwen3.6-35B-A3B that is 8 % at one token, 1.5 %
at 64, and 0.5 % at 256. For more tokens one timed replay would choose by noise, and the replays
would delay serving where a joint step is captured late.
"""


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


FULL = (0, 0, 0)
"""Ports and type of an edge whose target starts when its source has ended."""
PROGRAMMATIC = (1, 0, 1)
"""CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""


@dataclass(frozen=True)
class Edge:
    """Edge between two nodes of a graph. kind: FULL or PROGRAMMATIC."""

    source: int
    target: int
    kind: tuple[int, int, int]


def choose_edges(graph: torch.cuda.CUDAGraph) -> None:
    """Make edges of a captured graph programmatic if its replays are faster with them.

    It must have been made with keep_graph. It is replayed a few times, even without such edges:
    every rank must replay it as often, and the kernels of ranks may differ.
    """
    if not has_programmatic_edges():
        return
    edges = dependent_edges(graph)
    full_ms = replay_ms(graph)
    edges = set_edges(graph, edges, PROGRAMMATIC)
    if replay_ms(graph) > full_ms:
        set_edges(graph, edges, FULL)


def start_early(graph: torch.cuda.CUDAGraph) -> None:
    """Make all edges of a captured graph programmatic that may be, whatever is faster."""
    if has_programmatic_edges():
        set_edges(graph, dependent_edges(graph), PROGRAMMATIC)


def num_programmatic(graph: torch.cuda.CUDAGraph) -> int:
    """Return the number of programmatic edges of a graph."""
    if not has_programmatic_edges():
        return 0
    return sum(edge.kind == PROGRAMMATIC for edge in edges_of(graph))


def has_programmatic_edges() -> bool:
    """Return whether the GPU and its driver support programmatic edges: from CUDA 12.3 on."""
    if sm_number(torch.device("cuda", torch.cuda.current_device())) < HOPPER:
        return False
    return hasattr(_driver(), "cuGraphGetEdges_v2")


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Return the ms of a replay, after one that uploads the graph."""
    graph.replay()
    timer = StepTimer("cuda")
    graph.replay()
    timer.end()
    timer.wait()
    return timer.ms


def set_edges(
    graph: torch.cuda.CUDAGraph, edges: Sequence[Edge], kind: tuple[int, int, int]
) -> list[Edge]:
    """Change the kind of edges and instantiate the graph anew -> the changed edges."""
    driver = _driver()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    for edge in edges:
        source = ctypes.byref(ctypes.c_void_p(edge.source))
        target = ctypes.byref(ctypes.c_void_p(edge.target))
        before, after = EdgeData(*edge.kind), EdgeData(*kind)
        one = ctypes.c_size_t(1)
        _call(driver.cuGraphRemoveDependencies_v2, raw, source, target, ctypes.byref(before), one)
        _call(driver.cuGraphAddDependencies_v2, raw, source, target, ctypes.byref(after), one)
    graph.instantiate()
    return [replace(edge, kind=kind) for edge in edges]


def dependent_edges(graph: torch.cuda.CUDAGraph) -> list[Edge]:
    """Return the full edges that may be programmatic: the source releases, and the target waits."""
    kernels = _loaded_kernels()
    releasing = _functions_with(RELEASE, kernels)
    waiting = _functions_with(WAIT, kernels)
    return [
        edge
        for edge in edges_of(graph)
        if edge.kind == FULL
        and _function_of(edge.source) in releasing
        and _function_of(edge.target) in waiting
    ]


def edges_of(graph: torch.cuda.CUDAGraph) -> list[Edge]:
    """Return all edges of a graph."""
    get_edges = _driver().cuGraphGetEdges_v2
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    _call(get_edges, raw, None, None, None, ctypes.byref(count))
    sources = (ctypes.c_void_p * count.value)()
    targets = (ctypes.c_void_p * count.value)()
    data = (EdgeData * count.value)()
    _call(get_edges, raw, sources, targets, data, ctypes.byref(count))
    kinds = [(one.from_port, one.to_port, one.type) for one in data]
    return [Edge(*ends) for ends in zip(sources, targets, kinds, strict=True)]


def _function_of(node: int) -> int | None:
    """Return the function that a kernel node launches, None for other nodes."""
    driver = _driver()
    kind = ctypes.c_int()
    _call(driver.cuGraphNodeGetType, ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != KERNEL_NODE:
        return None
    params = KernelNodeParams()
    _call(driver.cuGraphKernelNodeGetParams_v2, ctypes.c_void_p(node), ctypes.byref(params))
    return params.function


def _loaded_kernels() -> list[Any]:
    """Return the specializations of all kernels that this process has loaded.

    Other threads may import a module or load a kernel meanwhile, so each table is copied first.
    """
    if not find_spec("triton"):
        return []
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lockstep.")]
    kernels = {
        value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, JITFunction)
    }
    caches = [caches[0] for kernel in kernels for caches in list(kernel.device_caches.values())]
    specializations = [one for kept in caches for one in list(kept.values())]
    return [one for one in specializations if one.function is not None]


def _functions_with(instruction: str, kernels: Iterable[Any]) -> set[int]:
    """Return the CUDA functions of the kernels whose PTX has this instruction."""
    return {one.function for one in kernels if instruction in one.asm["ptx"]}


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Any, *arguments: Any) -> None:
    """Call a function of the CUDA driver. Raises RuntimeError with its error code."""
    code = function(*arguments)
    if code:
        raise RuntimeError(f"{function.__name__} returned CUDA error {code}")
