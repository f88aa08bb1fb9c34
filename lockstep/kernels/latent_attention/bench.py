"""The latent ops: rows whose pages hold the model's context, every token to a slot."""

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
from lockstep.kernels.formats.kv import codecs_of
from lockstep.kernels.formats.kv.table import latent_codec
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.step import PAGE_SIZE


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Both of a model with latent attention."""
    if model.latent:
        yield latent_rope_and_cache, partial(_rope, model, model.latent, env, query_len)
        yield latent_attention, partial(_attention, model, model.latent, env, query_len)


def _rope(model: ModelShape, own: LatentShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    codec = latent_codec(env.format, own.latent)
    kept = own.latent + own.rope
    line = cache_bytes_per_token(env.cache(codec, 1, 1, own.latent), env.random(1, 1, own.rope))
    token = (kept + 2 * model.heads * own.rope) * env.dtype.itemsize + line
    tokens = env.rows_per_chain(token * query_len) * query_len
    q = env.random(tokens, model.heads, own.plain + own.rope)
    kv = env.random(tokens, kept)
    slots = env.ints(torch.randperm(tokens) + PAGE_SIZE, torch.int64)
    positions = env.ints(torch.arange(tokens) % model.context, torch.int64)
    pages = -(-tokens // PAGE_SIZE) + 1
    latents = env.cache(codec, pages, PAGE_SIZE, own.latent)
    ropes = env.random(pages, PAGE_SIZE, own.rope)
    traits = dict(latent=own.latent, rope=own.rope, codecs=codecs_of(latents))
    backend, place = env.choose(latent_rope_and_cache, **traits)
    written = [ropes, *([latents] if isinstance(latents, Tensor) else latents.tensors())]
    angles = env.random(model.context, own.rope // 2, dtype=torch.float32)
    fixed = (env.ones(own.latent), angles.cos(), angles.sin())

    def run(q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return place(q, kv, *fixed, positions, slots, latents, ropes, EPS)

    def seen(begin: int, end: int, out: Any) -> list[Tensor]:
        own_slots = slots[begin * query_len : end * query_len]
        return [out, *(part.flatten(0, 1)[own_slots] for part in written)]

    size = f"{model.heads} heads, {own.latent} + {own.rope}"
    given = [q, kv, positions, slots]
    return benchmark_per_token(
        latent_rope_and_cache, size, query_len, backend, run, given, token, seen
    )


def _attention(model: ModelShape, own: LatentShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    heads = model.heads
    context = model.context
    codec = latent_codec(env.format, own.latent)
    kept = own.latent + own.rope
    size = env.dtype.itemsize
    columns = -(-context // PAGE_SIZE)
    line = cache_bytes_per_token(env.cache(codec, 1, 1, own.latent), env.random(1, 1, own.rope))
    rows = env.rows_per_chain(context * line)
    latents = env.cache(codec, rows * columns + 1, PAGE_SIZE, own.latent)
    ropes = env.random(rows * columns + 1, PAGE_SIZE, own.rope)
    traits = dict(heads=heads, latent=own.latent, rope=own.rope, codecs=codecs_of(latents))
    backend, attend = env.choose(latent_attention, **traits)
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    table = env.ints(order.view(rows, columns))
    q = [env.random(rows * query_len, heads, width) for width in (own.latent, own.rope)]
    starts = env.ints(torch.full((rows,), context - query_len))
    bounds = env.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        queries = [part[begin * query_len : end * query_len] for part in q]
        places = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(*queries, latents, ropes, *places, query_len, kept**-0.5)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved = context * line * rows + tokens * heads * (kept + own.latent) * size
        return Cost(moved, 2 * heads * (kept + own.latent) * context * tokens)

    return OpBenchmark(
        op=latent_attention.name,
        size=f"{heads} heads, {own.latent} + {own.rope}, context {context}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
