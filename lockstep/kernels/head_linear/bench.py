"""head_linear: MLA's query absorption and output expansion."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, LazyBenchmark, ModelShape, OpBenchmark
from lockstep.kernels.head_linear import head_linear


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield both maps of a model with latent attention."""
    if model.latent:
        nope = model.latent.nope
        latent = model.latent.latent
        value = model.latent.value
        for inputs, outputs in ((nope, latent), (latent, value)):
            sizes = (model.heads, inputs, outputs)
            yield head_linear, partial(_head_linear, sizes, env, query_len)


def _head_linear(sizes: tuple[int, int, int], env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build the benchmark of one map.

    env.random repeats its numbers for equal shapes, so each weight is cut from a wider one.
    """
    heads, inputs, outputs = sizes
    backend, run = env.choose(head_linear, inputs=inputs, outputs=outputs)
    count = heads * inputs * outputs
    size = env.dtype.itemsize
    variants = max(1, -(-env.chain_bytes // (count * size)))
    weights = [env.random(heads, outputs, inputs + i)[..., i:] for i in range(variants)]
    weights = [(weight * inputs**-0.5).contiguous() for weight in weights]
    x = env.random(env.max_rows * query_len, heads, inputs)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        tokens = x[begin * query_len : end * query_len]
        return lambda: run(tokens, weights[variant % variants])

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved = count + tokens * heads * (inputs + outputs)
        return Cost(size * moved, 2 * count * tokens)

    return OpBenchmark(
        op=head_linear.name,
        size=f"{heads}x{inputs} to {outputs}",
        query_len=query_len,
        backend=backend,
        rows=env.max_rows,
        call=call,
        cost=cost,
        variants=variants,
    )
