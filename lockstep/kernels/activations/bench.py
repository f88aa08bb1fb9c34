"""silu_mul between gate_up and down."""

from collections.abc import Iterator
from functools import partial

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.bench_types import BenchEnv, Made, Model, OpBenchmark, cut_by_tokens


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """silu_mul at the width of the model's MLP."""
    yield silu_mul, partial(_silu_mul, model.inner, env, query_len)


def _silu_mul(inner: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, run = env.choose(silu_mul)
    token = 3 * inner * env.dtype.itemsize
    x = env.random(env.enough(token * query_len) * query_len, 2 * inner)
    return cut_by_tokens(silu_mul, f"{inner}", query_len, backend, run, [x], token)
