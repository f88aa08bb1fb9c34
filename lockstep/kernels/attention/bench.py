"""paged_attention: rows whose cache holds the model's context."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.bench_types import BenchEnv, Cost, Made, Model, OpBenchmark
from lockstep.step import PAGE_SIZE


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """paged_attention with the model's heads."""
    if model.kv_heads:
        yield paged_attention, partial(_paged_attention, model, env, query_len)


def _paged_attention(model: Model, env: BenchEnv, query_len: int) -> OpBenchmark:
    heads = model.heads
    kv_heads = model.kv_heads
    dim = model.head_dim
    context = model.context
    traits = dict(heads=heads, kv_heads=kv_heads, head_dim=dim)
    backend, attend = env.choose(paged_attention, **traits)
    columns = -(-context // PAGE_SIZE)
    size = env.dtype.itemsize
    rows = env.enough(2 * context * kv_heads * dim * size)
    k, v = (env.random(rows * columns + 1 + i, PAGE_SIZE, kv_heads, dim)[i:] for i in range(2))
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    table = env.ints(order.view(rows, columns))
    q = env.random(rows * query_len, heads, dim)
    starts = env.ints(torch.full((rows,), context - query_len))
    bounds = env.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        tokens = q[begin * query_len : end * query_len]
        places = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(tokens, k, v, *places, query_len, dim**-0.5)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved = 2 * context * kv_heads * dim * rows + 2 * tokens * heads * dim
        return Cost(size * moved, 4 * context * heads * dim * tokens)

    return OpBenchmark(
        op=paged_attention.name,
        size=f"{heads}/{kv_heads}x{dim}, context {context}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
