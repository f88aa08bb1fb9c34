"""Benchmarks of the latent ops: rows whose pages hold the model's context, a slot per token."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.bench_types import (
    EPS,
    BenchEnv,
    Cost,
    LatentShape,
    LazyBenchmark,
    ModelShape,
    OpBenchmark,
    benchmark_per_token,
    cache_bytes_per_token,
)
from lockstep.kernels.formats.kv import quantizers_of
from lockstep.kernels.formats.kv.table import latent_quantizer
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.step import PAGE_SIZE


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield both ops of a model with latent attention."""
    if model.latent:
        yield latent_rope_and_cache, partial(_rope, model, model.latent, env, query_len)
        yield latent_attention, partial(_attention, model, model.latent, env, query_len)


def _rope(model: ModelShape, dims: LatentShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build the benchmark of latent_rope_and_cache."""
    quantizer = latent_quantizer(env.format, dims.latent)
    token_width = dims.latent + dims.rope
    token_bytes = cache_bytes_per_token(
        env.cache(quantizer, 1, 1, dims.latent), env.random(1, 1, dims.rope)
    )
    token = (token_width + 2 * model.heads * dims.rope) * env.dtype.itemsize + token_bytes
    tokens = env.rows_per_chain(token * query_len) * query_len
    q = env.random(tokens, model.heads, dims.nope + dims.rope)
    kv = env.random(tokens, token_width)
    slots = env.ints(torch.randperm(tokens) + PAGE_SIZE, torch.int64)
    positions = env.ints(torch.arange(tokens) % model.context, torch.int64)
    pages = -(-tokens // PAGE_SIZE) + 1
    latents = env.cache(quantizer, pages, PAGE_SIZE, dims.latent)
    ropes = env.random(pages, PAGE_SIZE, dims.rope)
    traits = dict(latent=dims.latent, rope=dims.rope, quantizers=quantizers_of(latents))
    backend, rope_op = env.choose(latent_rope_and_cache, **traits)
    written = [ropes, *([latents] if isinstance(latents, Tensor) else latents.tensors())]
    angles = env.random(model.context, dims.rope // 2, dtype=torch.float32)
    fixed = (env.ones(dims.latent), angles.cos(), angles.sin())

    def run(q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return rope_op(q, kv, *fixed, positions, slots, latents, ropes, EPS)

    def written_numbers(begin: int, end: int, out: Any) -> list[Tensor]:
        own_slots = slots[begin * query_len : end * query_len]
        return [out, *(part.flatten(0, 1)[own_slots] for part in written)]

    size = f"{model.heads} heads, {dims.latent} + {dims.rope}"
    inputs = [q, kv, positions, slots]
    return benchmark_per_token(
        latent_rope_and_cache, size, query_len, backend, run, inputs, token, written_numbers
    )


def _attention(model: ModelShape, dims: LatentShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build the benchmark of latent_attention: as many rows as exceed the L2, pages in random
    order."""
    heads = model.heads
    context = model.context
    quantizer = latent_quantizer(env.format, dims.latent)
    token_width = dims.latent + dims.rope
    size = env.dtype.itemsize
    pages_per_row = -(-context // PAGE_SIZE)
    token_bytes = cache_bytes_per_token(
        env.cache(quantizer, 1, 1, dims.latent), env.random(1, 1, dims.rope)
    )
    rows = env.rows_per_chain(context * token_bytes)
    latents = env.cache(quantizer, rows * pages_per_row + 1, PAGE_SIZE, dims.latent)
    ropes = env.random(rows * pages_per_row + 1, PAGE_SIZE, dims.rope)
    traits = dict(
        heads=heads, latent=dims.latent, rope=dims.rope, quantizers=quantizers_of(latents)
    )
    backend, attend = env.choose(latent_attention, **traits)
    page_order = (
        torch.randperm(rows * pages_per_row, generator=torch.Generator().manual_seed(0)) + 1
    )
    table = env.ints(page_order.view(rows, pages_per_row))
    q = [env.random(rows * query_len, heads, width) for width in (dims.latent, dims.rope)]
    starts = env.ints(torch.full((rows,), context - query_len))
    bounds = env.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        queries = [part[begin * query_len : end * query_len] for part in q]
        row_arguments = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(
            *queries, latents, ropes, *row_arguments, query_len, token_width**-0.5
        )

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved_bytes = (
            context * token_bytes * rows + tokens * heads * (token_width + dims.latent) * size
        )
        return Cost(moved_bytes, 2 * heads * (token_width + dims.latent) * context * tokens)

    return OpBenchmark(
        op=latent_attention.name,
        size=f"{heads} heads, {dims.latent} + {dims.rope}, context {context}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
