"""The benchmarks of a recurrence's laws: states, and what a step moves of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, LazyBenchmark, OpBenchmark
from lockstep.kernels.recurrent.cases import Dims, Raw, Weights, empty_state
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.kernels.registry import Op
from lockstep.step import GRID


@dataclass(frozen=True)
class Laws:
    """What is measured of a recurrence. inputs, chunk_inputs, weights: as its cases make them;
    traits: those of a layer; rounded: a step's output is of the model's dtype, not fp32."""

    step: Op
    chunk: Op
    inputs: Raw
    chunk_inputs: Raw
    weights: Weights
    traits: Callable[[Dims], dict[str, int]]
    rounded: bool

    def benchmarks(
        self, dims: Dims, env: BenchEnv, query_len: int, prompt: int
    ) -> Iterator[LazyBenchmark]:
        """Windows of `query_len` tokens, on states of 32 and 16 bits; and, once, prompt chunks of
        `prompt` tokens."""
        dims = replace(dims, w=query_len)
        for state in (torch.float32, torch.bfloat16):
            kept = replace(dims, state=state)
            yield self.step, partial(_step_benchmark, self, kept, env, query_len)
        if query_len == 1:
            yield self.chunk, partial(_chunk_benchmark, self, dims, env, prompt)


def _step_benchmark(laws: Laws, dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Windows of `query_len` tokens, rows with every number of tokens to replay among them."""
    backend, step = env.choose(laws.step, **laws.traits(dims))
    rows = env.rows_per_chain(dims.state.itemsize * dims.hv * dims.k * dims.v)
    state, kept = bench_state(dims, rows, env)
    given = _drawn(laws.inputs, dims, rows, query_len, env)
    layer = _on_device(laws.weights, dims, env)
    slots = env.ints(torch.randperm(rows) + 1, torch.int64)
    starts = env.ints(torch.arange(rows) + GRID)
    folded = env.ints(torch.arange(rows) + GRID - torch.arange(rows) % (dims.most + 1))
    width = env.dtype.itemsize if laws.rounded else torch.float32.itemsize

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        raw = [x[begin:end] for x in given]
        places = (slots[begin:end], starts[begin:end], folded[begin:end])
        return lambda: step(*raw, layer, state, *places)

    def cost(rows: int) -> Cost:
        out = query_len * dims.hv * dims.v * width
        return Cost(rows * (2 * row_bytes(state, query_len) + _brought(given) + out))

    return OpBenchmark(
        op=laws.step.name,
        size=_size(dims),
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        outputs=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: restore(state, kept),
    )


def _chunk_benchmark(laws: Laws, dims: Dims, env: BenchEnv, length: int) -> OpBenchmark:
    """Prompt chunks of `length` tokens behind a first one; all its flops are left out."""
    backend, chunk = env.choose(laws.chunk, **laws.traits(dims))
    rows = env.max_rows
    state, kept = bench_state(dims, rows, env)
    given = _drawn(laws.chunk_inputs, dims, rows, length, env)
    layer = _on_device(laws.weights, dims, env)
    slots = env.ints(torch.randperm(rows) + 1)
    bounds = env.ints(torch.arange(rows + 1) * length)
    starts = torch.full_like(slots, GRID)
    none = torch.zeros_like(slots)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        raw = [x[begin:end].flatten(0, 1) for x in given]
        own = slots[begin:end]
        places = (bounds[: end - begin + 1], starts[begin:end], own, own, none[begin:end])
        return lambda: chunk(*raw, layer, state, *places)

    def cost(rows: int) -> Cost:
        out = 4 * length * dims.hv * dims.v
        one = state.recurrent[0].numel() * state.recurrent.itemsize
        return Cost(rows * (2 * one + _brought(given) + out))

    return OpBenchmark(
        op=laws.chunk.name,
        size=_size(dims),
        query_len=length,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        outputs=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: restore(state, kept),
    )


def _size(dims: Dims) -> str:
    """HK/HVxKxV, and the state where it is not of fp32."""
    named = "" if dims.state == torch.float32 else ", bf16 state"
    return f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}{named}"


def _brought(given: list[Tensor]) -> int:
    """Bytes of a row's inputs."""
    return sum(x[0].numel() * x.itemsize for x in given)


def _drawn(inputs: Raw, dims: Dims, rows: int, length: int, env: BenchEnv) -> list[Tensor]:
    """A layer's inputs [rows, length, ...], drawn on the device."""
    like = inputs(dims, (1, 1), env.dtype, 0)
    return [env.random(rows, length, *x.shape[2:]) for x in like.values()]


def _on_device(weights: Weights, dims: Dims, env: BenchEnv) -> Any:
    """The weights of a layer, laid out as Build.matrix does."""
    found = weights(dims, env.dtype, 0)
    tensors = {n: x for n, x in vars(found).items() if isinstance(x, Tensor)}
    parts: dict[str, Any] = {n: x.to(env.device) for n, x in tensors.items()}
    if env.device != "cpu":
        parts["conv"] = parts["conv"].contiguous()
    return replace(found, **parts)


def bench_state(dims: Dims, rows: int, env: BenchEnv) -> tuple[RecurrentState, list[Tensor]]:
    """A state of `rows` slots and the null one, and its parts as they were."""
    state = empty_state(dims, rows + 1, env.dtype)
    for name, part in vars(state).items():
        values = env.random(*part.shape, dtype=part.dtype).mul_(0.3)
        setattr(state, name, torch.exp(-values.abs()) if name == "decay" else values)
    return state, [part.clone() for part in state.tensors()]


def row_bytes(state: RecurrentState, query_len: int) -> int:
    """What a step reads of a row's state, and as much again it writes: as the floor counts it."""
    lines = [part[0, :query_len] for name, part in vars(state).items() if name != "recurrent"]
    return sum(part.numel() * part.itemsize for part in (state.recurrent[0], *lines))


def restore(state: RecurrentState, kept: list[Tensor]) -> None:
    """The state as it was."""
    for part, value in zip(state.tensors(), kept, strict=True):
        part.copy_(value)
