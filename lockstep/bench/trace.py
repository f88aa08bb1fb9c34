"""Profiler trace of a few steps with the names of layers, and the time by layer.

Names come from hooks on the model's modules and from wrappers around the stages of the program,
which are removed after the trace. If steps are captured in CUDA graphs, the trace begins with graph
replays, whose kernels belong to no layer; as many uncaptured, named steps follow.
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
"""Prefix of the names in the trace, which distinguishes them from those of torch."""


@dataclass(frozen=True)
class LayerTime:
    """Time of all layers of one name, per step.

    host_us: CPU time without that of named inner ranges. device_us: time of the kernels launched
    there, 0 on a CPU. kernels: number of kernels.
    """

    name: str
    calls: float
    host_us: float
    device_us: float
    kernels: float


def trace_steps(
    llm: LLM, prompts: list[dict[str, Any]], temperature: float, path: Path, steps: int = 5
) -> list[LayerTime]:
    """Write a Chrome trace of `steps` decode steps to `path`, and return the time by name.

    The prompts are processed before the trace begins. Steps that replay a graph have the name
    CAPTURED. Raises ConfigError for the piecewise graph mode or a path that cannot be written.
    """
    engine = llm.engine
    if engine.plan.graph_mode == "piecewise":
        raise ConfigError(
            "cuda_graph_mode='piecewise' is not allowed with a trace; allowed: full, none, since "
            "the layers inside of a piece have no names. Choose one of them."
        )
    check_writable("trace", path)
    requests = _start_requests(llm, prompts, temperature, 2 * steps)
    on_gpu = engine.plan.device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiler:
        if engine.plan.graph_mode != "none":
            _run_steps(llm, CAPTURED, steps)
        with _named_ranges(llm):
            _run_steps(llm, STEP, steps)
    for request in requests:
        engine.abort(request.id)
    while engine.has_work():
        engine.step()
    profiler.export_chrome_trace(str(path))
    return layer_times(json.loads(path.read_text())["traceEvents"], steps)


def _run_steps(llm: LLM, name: str, steps: int) -> None:
    """Run steps in named ranges, and wait for their device work."""
    for _ in range(steps):
        with record_function(PREFIX + name):
            llm.engine.step()
    # Kernels that still run when the profile ends would be cut off.
    if llm.engine.plan.device == "cuda":
        torch.cuda.synchronize()


def _start_requests(
    llm: LLM, prompts: list[dict[str, Any]], temperature: float, steps: int
) -> list[Request]:
    """Run every prompt to its first token and WARM_STEPS further steps; return the requests."""
    engine = llm.engine
    # Enough tokens for all steps, including those while other prompts are still processed.
    max_tokens = (steps + WARM_STEPS + engine.plan.steps_in_flight + 1) * engine.plan.query_len
    max_tokens += (
        sum(-(-len(p["prompt_token_ids"]) // GRID) for p in prompts) * engine.plan.query_len
    )
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=0, detokenize=False
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
def _named_ranges(llm: LLM) -> Iterator[None]:
    """Run the uncaptured program in the context, with named stages, layers and ops."""
    worker: Any = worker_of(llm.engine)
    program = worker.program
    stages = (
        (program.table, "prepare", "table.prepare"),
        (program.sampler, "sample_target", "sampler.sample_target"),
        (program.table, "accept_and_commit", "table.accept_and_commit"),
        (program.drafter, "propose", "drafter.propose"),
        (program.model, "logits", "logits"),
    )
    context = getattr(program.drafter, "context", None)
    hooked_modules: set[nn.Module] = set()
    run_step = worker.run_step
    worker.run_step = worker.uncaptured
    with ExitStack() as stack:
        stack.callback(setattr, worker, "run_step", run_step)
        for owner, method, name in stages:
            stack.enter_context(_wrapped(owner, method, name))
        for prefix, root in (("", program.model), ("draft.", getattr(context, "module", None))):
            for name, module in root.named_modules() if root is not None else ():
                if name and module not in hooked_modules:
                    stack.enter_context(_hooked(module, prefix + name))
                    hooked_modules.add(module)
        yield


@contextmanager
def _wrapped(owner: Any, name: str, label: str) -> Iterator[None]:
    """Wrap the owner's method or function `name` in a named range in the context."""
    inner: Callable[..., Any] = getattr(owner, name)
    original = vars(owner).get(name)

    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(PREFIX + label):
            return inner(*arguments, **options)

    object.__setattr__(owner, name, run)
    try:
        yield
    finally:
        if original is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, original)


@contextmanager
def _hooked(module: nn.Module, name: str) -> Iterator[None]:
    """Record a module's calls and its ops as named ranges of the profiler.

    An op has a separate name if the module has submodules, else the name of the module.
    """
    label = f"{name}:{type(module).__name__}" if is_cached(module) else name
    open_ranges: list[Any] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        open_ranges.append(record_function(PREFIX + label))
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
            stack.enter_context(_wrapped(module, op, f"{label}.{op}" if has_layers else label))
        yield


def layer_times(events: list[dict[str, Any]], steps: int) -> list[LayerTime]:
    """Return the time by name in a Chrome trace, longest first; layers of a kind are one line.

    A kernel belongs to the innermost named range around its launch on the host. If it starts before
    the previous kernel ends, its time counts from that end, so that all times add up.
    """
    ranges = [e for e in events if str(e.get("name", "")).startswith(PREFIX) and _on_host(e)]
    launches = [e for e in events if _is_launch(e)]
    kernels = _device_times(events)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for thread in {(e["pid"], e["tid"]) for e in ranges}:
        thread_events = [e for e in ranges + launches if (e["pid"], e["tid"]) == thread]
        for name, *values in _exclusive(thread_events, kernels):
            sums[name] = [a + b for a, b in zip(sums[name], values, strict=True)]
    lines = [
        LayerTime(name, *(number / steps for number in values)) for name, values in sums.items()
    ]
    return sorted(lines, key=lambda line: (-line.device_us, -line.host_us))


def _device_times(events: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Return, by correlation id of a launch, the us of each kernel, copy or fill it started."""
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
    has_correlation = "dur" in event and "correlation" in event.get("args", {})
    return has_correlation and event.get("cat") in ("cuda_runtime", "cuda_driver")


def _exclusive(
    events: list[dict[str, Any]], kernels: dict[int, list[float]]
) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield (name, calls, host us, device us, kernels) contributions of one thread's events.

    events: nested named ranges and launches. kernels: us of each started kernel by correlation id.
    """
    open_events: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_events and event["ts"] >= open_events[-1]["ts"] + open_events[-1]["dur"]:
            open_events.pop()
        parent = _layer_group(open_events[-1]["name"]) if open_events else None
        if _on_host(event):
            group = _layer_group(event["name"])
            yield group, float(group != parent), float(event["dur"]), 0.0, 0.0
            if parent:
                yield parent, 0.0, -float(event["dur"]), 0.0, 0.0
            open_events.append(event)
        elif parent:
            durations = kernels.get(event["args"]["correlation"], [])
            yield parent, 0.0, 0.0, sum(durations), float(len(durations))


def _layer_group(name: str) -> str:
    """Replace layer numbers: blocks.7.mlp.down becomes blocks.*.mlp.down."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(PREFIX))
