"""linear: every weight of a model, each measurement walking through several of its shape."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, LazyBenchmark, ModelShape, OpBenchmark
from lockstep.kernels.linear import linear

MAX_WEIGHTS = 64
"""Maximum distinct weights of a measurement."""


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield linear at each weight of the model."""
    for name, n, k in model.weights:
        yield linear, partial(_linear, name, n, k, env, query_len)


def _linear(name: str, n: int, k: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Measure linear at one weight through the model's own layer."""
    size = env.dtype.itemsize
    variants = min(-(-env.chain_bytes // (n * k * size)) + 1, MAX_WEIGHTS)
    backend, layers = env.linears(n, k, variants, env.max_rows * query_len)
    x = env.random(env.max_rows * query_len, k)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        layer = layers[variant % variants]
        rows = x[begin * query_len : end * query_len]
        return lambda: layer(rows)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        return Cost(size * (n * k + tokens * (n + k)), 2 * n * k * tokens)

    return OpBenchmark(
        op=linear.name,
        size=f"{name} {n}x{k}",
        query_len=query_len,
        backend=backend,
        rows=env.max_rows,
        call=call,
        cost=cost,
        variants=variants,
    )
