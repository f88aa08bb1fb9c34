"""route: the routing of each token, as Qwen's models do it."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from lockstep.kernels.bench_types import (
    BenchEnv,
    LazyBenchmark,
    ModelShape,
    MoeShape,
    OpBenchmark,
    benchmark_per_token,
)
from lockstep.kernels.route import route

PAIR_BYTES = 4
"""Bytes of an id; a weight has the model's dtype."""


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield route of the model's experts, if it has any."""
    if model.moe:
        yield route, partial(_route, model.moe, env, query_len)


def _route(moe: MoeShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, choose = env.choose(route, experts=moe.experts)
    size = env.dtype.itemsize
    token = size * moe.experts + (PAIR_BYTES + size) * moe.top_k
    logits = env.random(env.rows_per_chain(token * query_len) * query_len, moe.experts)

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights, *_ = choose(logits, moe.top_k, dtype=env.dtype)
        return ids, weights

    what = f"{moe.experts}/{moe.top_k}"
    return benchmark_per_token(route, what, query_len, backend, run, [logits], token)
