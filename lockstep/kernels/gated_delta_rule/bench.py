"""Both laws of a Gated DeltaNet mixer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, Made, Model, OpBenchmark
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaWeights,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.cases import inputs, weights
from lockstep.kernels.recurrent._bench import bench_state, restore, row_bytes
from lockstep.kernels.recurrent.cases import Dims
from lockstep.step import GRID


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """Windows of `query_len` tokens, on states of 32 and 16 bits; and, once, prompt chunks of the
    model's own length."""
    if model.delta:
        dims = replace(model.delta, w=query_len)
        for state in (torch.float32, torch.bfloat16):
            kept = replace(dims, state=state)
            yield gated_delta_step, partial(_gated_delta_step, kept, env, query_len)
        if query_len == 1:
            yield gated_delta_chunk, partial(_gated_delta_chunk, dims, env, model.prompt)


def _gated_delta_step(dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Windows of `query_len` tokens, rows with every number of tokens to replay among them."""
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    backend, step = env.choose(gated_delta_step, **traits, kernel=dims.r + 1)
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
        out = given[1][0].numel() * env.dtype.itemsize
        return Cost(rows * (2 * row_bytes(state, query_len) + brought + out))

    named = "" if dims.state == torch.float32 else ", bf16 state"
    return OpBenchmark(
        op=gated_delta_step.name,
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}{named}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: restore(state, kept),
    )


def _gated_delta_chunk(dims: Dims, env: BenchEnv, length: int) -> OpBenchmark:
    """Prompt chunks of `length` tokens behind a first one; all its flops are left out."""
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    backend, chunk = env.choose(gated_delta_chunk, **traits, kernel=dims.r + 1)
    rows = env.most
    state, kept = bench_state(dims, rows, env)
    mixed, _, b, a = _inputs(dims, rows, length, env)
    given = (mixed, b, a)
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
        op=gated_delta_chunk.name,
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}",
        query_len=length,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: restore(state, kept),
    )


def _inputs(dims: Dims, rows: int, length: int, env: BenchEnv) -> list[Tensor]:
    """mixed, z, b and a [rows, length, ...], drawn on the device."""
    like = inputs(dims, (1, 1), env.dtype, seed=0)
    return [env.random(rows, length, *like[name].shape[2:]) for name in ("mixed", "z", "b", "a")]


def _weights(dims: Dims, env: BenchEnv) -> GatedDeltaWeights:
    """The weights of a layer on the device, laid out as Build.matrix does."""
    found = weights(dims, env.dtype, seed=0)
    tensors = {n: x for n, x in vars(found).items() if isinstance(x, Tensor)}
    parts: dict[str, Any] = {n: x.to(env.device) for n, x in tensors.items()}
    if env.device != "cpu":
        parts["conv"] = parts["conv"].contiguous()
    return replace(found, **parts)
