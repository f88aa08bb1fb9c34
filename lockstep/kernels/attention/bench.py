"""Benchmark of paged_attention: rows whose cache contains the model's context."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.bench_types import (
    BenchEnv,
    Cost,
    LazyBenchmark,
    ModelShape,
    OpBenchmark,
    cache_bytes_per_token,
)
from lockstep.kernels.formats.kv import quantizers_of
from lockstep.kernels.formats.kv.table import head_quantizers
from lockstep.step import PAGE_SIZE


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield paged_attention with the model's heads."""
    if model.kv_heads:
        yield paged_attention, partial(_paged_attention, model, env, query_len)


def _paged_attention(model: ModelShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build the benchmark: as many rows as exceed the L2, with pages in random order."""
    heads = model.heads
    kv_heads = model.kv_heads
    dim = model.head_dim
    context = model.context
    pages_per_row = -(-context // PAGE_SIZE)
    size = env.dtype.itemsize
    quantizers = head_quantizers(env.format, dim) or (None, None)
    shape = (PAGE_SIZE, kv_heads, dim)
    token_bytes = cache_bytes_per_token(
        *(env.cache(quantizer, 1, *shape) for quantizer in quantizers)
    )
    rows = env.rows_per_chain(context * token_bytes)
    pages = rows * pages_per_row + 1
    k, v = (env.cache(quantizer, pages + i, *shape) for i, quantizer in enumerate(quantizers))
    traits = dict(heads=heads, kv_heads=kv_heads, head_dim=dim, quantizers=quantizers_of(k, v))
    backend, attend = env.choose(paged_attention, **traits)
    order = torch.randperm(rows * pages_per_row, generator=torch.Generator().manual_seed(0)) + 1
    table = env.ints(order.view(rows, pages_per_row))
    q = env.random(rows * query_len, heads, dim)
    starts = env.ints(torch.full((rows,), context - query_len))
    bounds = env.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        tokens = q[begin * query_len : end * query_len]
        row_arguments = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(tokens, k, v, *row_arguments, query_len, dim**-0.5)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved_bytes = context * token_bytes * rows + 2 * tokens * heads * dim * size
        return Cost(moved_bytes, 4 * context * heads * dim * tokens)

    return OpBenchmark(
        op=paged_attention.name,
        size=f"{heads}/{kv_heads}x{dim}, context {context}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
