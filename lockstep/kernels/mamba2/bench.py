"""Both laws of a Mamba-2 mixer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, Made, Model, OpBenchmark
from lockstep.kernels.mamba2 import Mamba2Weights, mamba2_chunk, mamba2_step
from lockstep.kernels.mamba2.cases import inputs, weights
from lockstep.kernels.recurrent._bench import bench_state, restore, row_bytes
from lockstep.kernels.recurrent.cases import Dims
from lockstep.step import GRID


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """Windows of `query_len` tokens, on states of 32 and 16 bits; and, once, prompt chunks of the
    model's own length."""
    if model.mamba:
        dims = replace(model.mamba, w=query_len)
        for state in (torch.float32, torch.bfloat16):
            kept = replace(dims, state=state)
            yield mamba2_step, partial(_mamba2_step, kept, env, query_len)
        if query_len == 1:
            yield mamba2_chunk, partial(_mamba2_chunk, dims, env, model.prompt)


def _traits(dims: Dims) -> dict[str, int]:
    return dict(groups=dims.hk, heads=dims.hv, state_dim=dims.k, head_dim=dims.v, kernel=dims.r + 1)


def _size(dims: Dims) -> str:
    """G/HxNxP, and the state where it is not of fp32."""
    named = "" if dims.state == torch.float32 else ", bf16 state"
    return f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}{named}"


def _mamba2_step(dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Windows of `query_len` tokens, rows with every number of tokens to replay among them."""
    backend, step = env.choose(mamba2_step, **_traits(dims))
    rows = env.enough(dims.state.itemsize * dims.hv * dims.k * dims.v)
    state, kept = bench_state(dims, rows, env)
    given = _inputs(dims, rows, query_len, env)
    layer = _weights(dims, env)
    slots = env.ints(torch.randperm(rows) + 1, torch.int64)
    starts = env.ints(torch.arange(rows) + GRID)
    folded = env.ints(torch.arange(rows) + GRID - torch.arange(rows) % (dims.most + 1))

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        raw = [x[begin:end] for x in given]
        places = (slots[begin:end], starts[begin:end], folded[begin:end])
        return lambda: step(*raw, layer, state, *places)

    def cost(rows: int) -> Cost:
        brought = sum(x[0].numel() * x.itemsize for x in given)
        out = 4 * query_len * dims.hv * dims.v
        return Cost(rows * (2 * row_bytes(state, query_len) + brought + out))

    return OpBenchmark(
        op=mamba2_step.name,
        size=_size(dims),
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: restore(state, kept),
    )


def _mamba2_chunk(dims: Dims, env: BenchEnv, length: int) -> OpBenchmark:
    """Prompt chunks of `length` tokens behind a first one; all its flops are left out."""
    backend, chunk = env.choose(mamba2_chunk, **_traits(dims))
    rows = env.most
    state, kept = bench_state(dims, rows, env)
    given = _inputs(dims, rows, length, env)
    layer = _weights(dims, env)
    slots = env.ints(torch.randperm(rows) + 1)
    bounds = env.ints(torch.arange(rows + 1) * length)
    starts = torch.full_like(slots, GRID)
    none = torch.zeros_like(slots)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        raw = [x[begin:end].flatten(0, 1) for x in given]
        own = slots[begin:end]
        places = (bounds[: end - begin + 1], starts[begin:end], own, own, none[begin:end])
        return lambda: chunk(*raw, layer, state, *places)

    def cost(rows: int) -> Cost:
        brought = sum(x[0].numel() * x.itemsize for x in given)
        out = 4 * length * dims.hv * dims.v
        one = state.recurrent[0].numel() * state.recurrent.itemsize
        return Cost(rows * (2 * one + brought + out))

    return OpBenchmark(
        op=mamba2_chunk.name,
        size=_size(dims),
        query_len=length,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: restore(state, kept),
    )


def _inputs(dims: Dims, rows: int, length: int, env: BenchEnv) -> list[Tensor]:
    """mixed and dt [rows, length, ...], drawn on the device."""
    like = inputs(dims, (1, 1), env.dtype, seed=0)
    return [env.random(rows, length, *like[name].shape[2:]) for name in ("mixed", "dt")]


def _weights(dims: Dims, env: BenchEnv) -> Mamba2Weights:
    """The weights of a layer on the device, laid out as Build.matrix does."""
    found = weights(dims, env.dtype, seed=0)
    tensors = {n: x for n, x in vars(found).items() if isinstance(x, Tensor)}
    parts: dict[str, Any] = {n: x.to(env.device) for n, x in tensors.items()}
    if env.device != "cpu":
        parts["conv"] = parts["conv"].contiguous()
    return replace(found, **parts)
