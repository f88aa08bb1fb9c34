"""Benchmarks of the norms of hidden states and of recurrent layers' outputs."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.bench_types import (
    EPS,
    BenchEnv,
    LazyBenchmark,
    ModelShape,
    OpBenchmark,
    benchmark_per_token,
)
from lockstep.kernels.norm import add_rms_norm, gated_group_norm, gated_rms_norm, rms_norm
from lockstep.kernels.recurrent.cases import Dims


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield benchmarks of the norms that the model has."""
    yield rms_norm, partial(_rms_norm, model.hidden, env, query_len)
    yield add_rms_norm, partial(_add_rms_norm, model.hidden, env, query_len)
    if model.delta:
        yield gated_rms_norm, partial(_gated_rms_norm, model.delta, env, query_len)
    if model.mamba:
        yield gated_group_norm, partial(_gated_group_norm, model.mamba, env, query_len)


def _rms_norm(width: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, norm = env.choose(rms_norm, width=width)
    weight = env.ones(width)
    token = 2 * width * env.dtype.itemsize
    x = env.random(env.rows_per_chain(token * query_len) * query_len, width)

    def run(x: Tensor) -> Tensor:
        return norm(x, weight, EPS, 0.0)

    return benchmark_per_token(rms_norm, f"{width}", query_len, backend, run, [x], token)


def _add_rms_norm(width: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, norm = env.choose(add_rms_norm, width=width)
    weight = env.ones(width)
    token = 4 * width * env.dtype.itemsize
    tokens = env.rows_per_chain(token * query_len) * query_len
    arguments = [env.random(tokens, width), env.random(tokens + 1, width)[1:]]

    def run(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x, delta, weight, EPS, 0.0)

    return benchmark_per_token(add_rms_norm, f"{width}", query_len, backend, run, arguments, token)


def _gated_rms_norm(dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, norm = env.choose(gated_rms_norm, width=dims.v)
    weight = env.ones(dims.v)
    token = dims.hv * dims.v * (4 + 2 * env.dtype.itemsize)
    tokens = env.rows_per_chain(token * query_len) * query_len
    x = env.random(tokens, dims.hv, dims.v, dtype=torch.float32)
    arguments = [x, env.random(tokens, dims.hv, dims.v)]
    size = f"{dims.hv}x{dims.v}"

    def run(x: Tensor, gate: Tensor) -> Tensor:
        return norm(x, gate, weight, EPS)

    return benchmark_per_token(gated_rms_norm, size, query_len, backend, run, arguments, token)


def _gated_group_norm(dims: Dims, env: BenchEnv, query_len: int) -> OpBenchmark:
    width = dims.hv * dims.v // dims.hk
    backend, norm = env.choose(gated_group_norm, width=width)
    weight = env.ones(dims.hk, width)
    token = dims.hk * width * (4 + 2 * env.dtype.itemsize)
    tokens = env.rows_per_chain(token * query_len) * query_len
    x = env.random(tokens, dims.hk, width, dtype=torch.float32)
    arguments = [x, env.random(tokens, dims.hk, width)]
    size = f"{dims.hk}x{width}"

    def run(x: Tensor, gate: Tensor) -> Tensor:
        return norm(x, gate, weight, EPS)

    return benchmark_per_token(gated_group_norm, size, query_len, backend, run, arguments, token)
