"""Benchmarks of a recurrence's ops, in recurrent and in chunked form."""

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
class RecurrenceOps:
    """Ops of a recurrence to measure, with generators of their arguments.

    inputs, chunk_inputs, weights: those of the ops' test cases. traits: returns the traits of a
    layer. rounded: the recurrent form returns the model's dtype, not fp32.
    """

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
        """Yield windows of `query_len` tokens with fp32 and bf16 states.

        At query length 1, prompt chunks of `prompt` tokens follow.
        """
        dims = replace(dims, w=query_len)
        for state in (torch.float32, torch.bfloat16):
            stored = replace(dims, state=state)
            yield self.step, partial(_step_benchmark, self, stored, env, query_len)
        if query_len == 1:
            yield self.chunk, partial(_chunk_benchmark, self, dims, env, prompt)


def _step_benchmark(ops: RecurrenceOps, dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build a benchmark of windows; rows differ in how many tokens they replay."""
    backend, step = env.choose(ops.step, **ops.traits(dims))
    rows = env.rows_per_chain(dims.state.itemsize * dims.hv * dims.k * dims.v)
    state, initial = bench_state(dims, rows, env)
    arguments = _random_inputs(ops.inputs, dims, rows, query_len, env)
    layer = _on_device(ops.weights, dims, env)
    slots = env.ints(torch.randperm(rows) + 1, torch.int64)
    starts = env.ints(torch.arange(rows) + GRID)
    folded = env.ints(torch.arange(rows) + GRID - torch.arange(rows) % (dims.max_replayed + 1))
    width = env.dtype.itemsize if ops.rounded else torch.float32.itemsize

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        raw = [x[begin:end] for x in arguments]
        rows = (slots[begin:end], starts[begin:end], folded[begin:end])
        return lambda: step(*raw, layer, state, *rows)

    def cost(rows: int) -> Cost:
        out = query_len * dims.hv * dims.v * width
        return Cost(rows * (2 * row_bytes(state, query_len) + _input_bytes(arguments) + out))

    return OpBenchmark(
        op=ops.step.name,
        size=_size(dims),
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        outputs=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: restore(state, initial),
    )


def _chunk_benchmark(ops: RecurrenceOps, dims: Dims, env: BenchEnv, length: int) -> OpBenchmark:
    """Build a benchmark of prompt chunks that resume from a state. Its cost has no flops."""
    backend, chunk = env.choose(ops.chunk, **ops.traits(dims))
    rows = env.max_rows
    state, initial = bench_state(dims, rows, env)
    arguments = _random_inputs(ops.chunk_inputs, dims, rows, length, env)
    layer = _on_device(ops.weights, dims, env)
    slots = env.ints(torch.randperm(rows) + 1)
    bounds = env.ints(torch.arange(rows + 1) * length)
    starts = torch.full_like(slots, GRID)
    none = torch.zeros_like(slots)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        raw = [x[begin:end].flatten(0, 1) for x in arguments]
        source = slots[begin:end]
        rows = (bounds[: end - begin + 1], starts[begin:end], source, source, none[begin:end])
        return lambda: chunk(*raw, layer, state, *rows)

    def cost(rows: int) -> Cost:
        out = 4 * length * dims.hv * dims.v
        state_bytes = state.recurrent[0].numel() * state.recurrent.itemsize
        return Cost(rows * (2 * state_bytes + _input_bytes(arguments) + out))

    return OpBenchmark(
        op=ops.chunk.name,
        size=_size(dims),
        query_len=length,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        outputs=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: restore(state, initial),
    )


def _size(dims: Dims) -> str:
    """Return the size's name: HK/HVxKxV, and the dtype of a bf16 state."""
    suffix = "" if dims.state == torch.float32 else ", bf16 state"
    return f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}{suffix}"


def _input_bytes(arguments: list[Tensor]) -> int:
    """Return the bytes of a row's inputs."""
    return sum(x[0].numel() * x.itemsize for x in arguments)


def _random_inputs(inputs: Raw, dims: Dims, rows: int, length: int, env: BenchEnv) -> list[Tensor]:
    """Return random inputs [rows, length, ...] of a layer, generated on the device."""
    like = inputs(dims, (1, 1), env.dtype, 0)
    return [env.random(rows, length, *x.shape[2:]) for x in like.values()]


def _on_device(weights: Weights, dims: Dims, env: BenchEnv) -> Any:
    """Return the weights of a layer on the device, laid out as a model's."""
    layer = weights(dims, env.dtype, 0)
    tensors = {n: x for n, x in vars(layer).items() if isinstance(x, Tensor)}
    parts: dict[str, Any] = {n: x.to(env.device) for n, x in tensors.items()}
    if env.device != "cpu":
        parts["conv"] = parts["conv"].contiguous()
    return replace(layer, **parts)


def bench_state(dims: Dims, rows: int, env: BenchEnv) -> tuple[RecurrentState, list[Tensor]]:
    """Return a state of `rows` slots and the null slot, and copies of its parts."""
    state = empty_state(dims, rows + 1, env.dtype)
    for name, part in vars(state).items():
        values = env.random(*part.shape, dtype=part.dtype).mul_(0.3)
        setattr(state, name, torch.exp(-values.abs()) if name == "decay" else values)
    return state, [part.clone() for part in state.tensors()]


def row_bytes(state: RecurrentState, query_len: int) -> int:
    """Return the bytes of a row's state and window that a step reads, and writes again."""
    entries = [part[0, :query_len] for name, part in vars(state).items() if name != "recurrent"]
    return sum(part.numel() * part.itemsize for part in (state.recurrent[0], *entries))


def restore(state: RecurrentState, initial: list[Tensor]) -> None:
    """Copy the initial parts back into the state."""
    for part, value in zip(state.tensors(), initial, strict=True):
        part.copy_(value)
