"""The timeline of a few steps with the names of layers in it, and the time by layer.

Nothing in a step changes: names come from hooks on the model's modules and from wrappers around the
stages of the program, put on for the trace and taken off after it. Where steps are captured, the
trace begins with some as they run, whose kernels have no layers; then come as many of the same
program, uncaptured and named.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.cache.specs import is_cached
from lockstep.errors import ConfigError
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.settings import check_writable
from lockstep.step import GRID
from lockstep.worker.executor import worker_of

WARM_STEPS = 3
STEP = "step"
CAPTURED = "captured step"
PREFIX = "lockstep."
"""In front of the names in the trace, to tell them from torch's own."""


@dataclass(frozen=True)
class Line:
    """The time of all places of one name. host_us: on the CPU, less what is named inside of it;
    device_us: of the kernels launched there (0 on a CPU); calls and times are per step."""

    name: str
    calls: float
    host_us: float
    device_us: float
    kernels: float


def trace_steps(
    llm: LLM, prompts: list[dict[str, Any]], temperature: float, path: Path, steps: int = 5
) -> list[Line]:
    """Writes a Chrome trace of `steps` generated steps to `path`; returns the time by name.

    The prompts are computed first, outside of the trace. Steps that replay a graph count as
    CAPTURED. Raises ConfigError where only pieces are captured, or the path is no file's.
    """
    engine = llm.engine
    if engine.plan.graph_mode == "piecewise":
        raise ConfigError(
            "cuda_graph_mode='piecewise' is not allowed with a trace; allowed: full, none, since "
            "the layers inside of a piece have no names. Choose one of them."
        )
    check_writable("trace", path)
    requests = _start(llm, prompts, temperature, 2 * steps)
    on_gpu = engine.plan.device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        if engine.plan.graph_mode != "none":
            _run(llm, CAPTURED, steps)
        with _named(llm):
            _run(llm, STEP, steps)
    for request in requests:
        engine.abort(request.id)
    while engine.has_work():
        engine.step()
    profiler.export_chrome_trace(str(path))
    return table_of(json.loads(path.read_text())["traceEvents"], steps)


def _run(llm: LLM, name: str, steps: int) -> None:
    """Steps under a name, and the end of their device work."""
    for _ in range(steps):
        with record_function(PREFIX + name):
            llm.engine.step()
    if llm.engine.plan.device == "cuda":
        torch.cuda.synchronize()


def _start(
    llm: LLM, prompts: list[dict[str, Any]], temperature: float, steps: int
) -> list[Request]:
    """Brings every request to its first token, and WARM_STEPS further; long answers are asked."""
    engine = llm.engine
    most = (steps + WARM_STEPS + engine.plan.steps_in_flight + 1) * engine.plan.query_len
    most += sum(-(-len(p["prompt_token_ids"]) // GRID) for p in prompts) * engine.plan.query_len
    params = SamplingParams(
        temperature=temperature, max_tokens=most, ignore_eos=True, seed=0, detokenize=False
    )
    requests = [
        request
        for index, prompt in enumerate(prompts)
        for request in llm.processor.requests(f"trace-{index}", prompt, params)
    ]
    for request in requests:
        engine.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    return requests


@contextmanager
def _named(llm: LLM) -> Iterator[None]:
    """The uncaptured program, with names on its stages, on every layer of target and draft module,
    and on their ops."""
    runner: Any = worker_of(llm.engine)
    program = runner.program
    stages = (
        (program.table, "prepare", "table.prepare"),
        (program.sampler, "sample_target", "sampler.sample_target"),
        (program.table, "accept_and_commit", "table.accept_and_commit"),
        (program.drafter, "propose", "drafter.propose"),
        (program.model, "logits", "logits"),
    )
    context = getattr(program.drafter, "context", None)
    named: set[nn.Module] = set()
    replaced = runner.run_step
    runner.run_step = runner.uncaptured
    with ExitStack() as stack:
        stack.callback(setattr, runner, "run_step", replaced)
        for owner, method, name in stages:
            stack.enter_context(_wrapped(owner, method, name))
        for prefix, root in (("", program.model), ("draft.", getattr(context, "module", None))):
            for name, module in root.named_modules() if root is not None else ():
                if name and module not in named:
                    stack.enter_context(_hooked(module, prefix + name))
                    named.add(module)
        yield


@contextmanager
def _wrapped(owner: Any, name: str, shown: str) -> Iterator[None]:
    """The owner's method or function `name` shown in the trace, until the end."""
    inner: Callable[..., Any] = getattr(owner, name)
    own = vars(owner).get(name)

    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(PREFIX + shown):
            return inner(*arguments, **options)

    object.__setattr__(owner, name, run)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, own)


@contextmanager
def _hooked(module: nn.Module, name: str) -> Iterator[None]:
    """The module's calls shown under its name, and those of its ops: under their own where there
    are layers below, else under the module's, which may be called past its forward."""
    shown = f"{name}:{type(module).__name__}" if is_cached(module) else name
    open_ranges: list[Any] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        open_ranges.append(record_function(PREFIX + shown))
        open_ranges[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, result: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    ops = [n for n, value in vars(module).items() if isinstance(value, FunctionType)]
    with ExitStack() as stack:
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ):
            stack.callback(handle.remove)
        for op in ops:
            has_layers = any(True for _ in module.children())
            stack.enter_context(_wrapped(module, op, f"{shown}.{op}" if has_layers else shown))
        yield


def table_of(events: list[dict[str, Any]], steps: int) -> list[Line]:
    """The time by name in a Chrome trace, longest first: layers of one kind count as one.

    A kernel belongs to the innermost name around its launch on the host. Where it starts before
    the one in front ends, and waits, its time counts from that end: all times add up.
    """
    ranges = [e for e in events if str(e.get("name", "")).startswith(PREFIX) and _on_host(e)]
    launches = [e for e in events if _is_launch(e)]
    kernels = _device_times(events)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for thread in {(e["pid"], e["tid"]) for e in ranges}:
        mine = [e for e in ranges + launches if (e["pid"], e["tid"]) == thread]
        for name, *numbers in _exclusive(mine, kernels):
            sums[name] = [a + b for a, b in zip(sums[name], numbers, strict=True)]
    lines = [Line(name, *(number / steps for number in found)) for name, found in sums.items()]
    return sorted(lines, key=lambda line: (-line.device_us, -line.host_us))


def _device_times(events: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Correlation with a launch -> us of each kernel, copy or fill that it started."""
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    times: dict[int, list[float]] = defaultdict(list)
    latest = 0.0
    for event in sorted(work, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        times[event["args"]["correlation"]].append(max(end - max(event["ts"], latest), 0.0))
        latest = max(latest, end)
    return times


def _on_host(event: dict[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and event.get("ph") == "X"


def _is_launch(event: dict[str, Any]) -> bool:
    named = "dur" in event and "correlation" in event.get("args", {})
    return named and event.get("cat") in ("cuda_runtime", "cuda_driver")


def _exclusive(
    events: list[dict[str, Any]], kernels: dict[int, list[float]]
) -> Iterator[tuple[str, float, float, float, float]]:
    """(name, calls, host us, device us, kernels) of the names and launches that nest on one
    thread, piece by piece. kernels: correlation -> us of each kernel that a launch started."""
    inside: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while inside and event["ts"] >= inside[-1]["ts"] + inside[-1]["dur"]:
            inside.pop()
        around = _kind(inside[-1]["name"]) if inside else None
        if _on_host(event):
            kind = _kind(event["name"])
            yield kind, float(kind != around), float(event["dur"]), 0.0, 0.0
            if around:
                yield around, 0.0, -float(event["dur"]), 0.0, 0.0
            inside.append(event)
        elif around:
            durations = kernels.get(event["args"]["correlation"], [])
            yield around, 0.0, 0.0, sum(durations), float(len(durations))


def _kind(name: str) -> str:
    """blocks.7.mlp.down -> blocks.*.mlp.down"""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(PREFIX))
