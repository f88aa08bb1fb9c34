"""Benchmarks of silu_mul and relu2."""

from collections.abc import Iterator
from functools import partial

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.bench_types import (
    BenchEnv,
    LazyBenchmark,
    ModelShape,
    OpBenchmark,
    benchmark_per_token,
)


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield silu_mul for a gated MLP, relu2 for one without a gate.

    The model "small", which has layers of every kind, gets both.
    """
    if model.gated:
        yield silu_mul, partial(_silu_mul, model.inner, env, query_len)
    if not model.gated or (model.delta and model.mamba):
        yield relu2, partial(_relu2, model.inner, env, query_len)


def _silu_mul(inner: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, run = env.choose(silu_mul)
    token = 3 * inner * env.dtype.itemsize
    x = env.random(env.rows_per_chain(token * query_len) * query_len, 2 * inner)
    return benchmark_per_token(silu_mul, f"{inner}", query_len, backend, run, [x], token)


def _relu2(inner: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, run = env.choose(relu2)
    token = 2 * inner * env.dtype.itemsize
    x = env.random(env.rows_per_chain(token * query_len) * query_len, inner)
    return benchmark_per_token(relu2, f"{inner}", query_len, backend, run, [x], token)
