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
    Latent,
    Made,
    Model,
    OpBenchmark,
    cut_by_tokens,
)
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.step import PAGE_SIZE


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """Both of a model with latent attention."""
    if model.latent:
        yield latent_rope_and_cache, partial(_rope, model, model.latent, env, query_len)
        yield latent_attention, partial(_attention, model, model.latent, env, query_len)


def _rope(model: Model, own: Latent, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, place = env.choose(latent_rope_and_cache, latent=own.latent, rope=own.rope)
    kept = own.latent + own.rope
    token = 2 * (kept + model.heads * own.rope) * env.dtype.itemsize
    tokens = env.enough(token * query_len) * query_len
    q = env.random(tokens, model.heads, own.plain + own.rope)
    kv = env.random(tokens, kept)
    slots = env.ints(torch.randperm(tokens) + PAGE_SIZE, torch.int64)
    positions = env.ints(torch.arange(tokens) % model.context, torch.int64)
    pages = -(-tokens // PAGE_SIZE) + 1
    caches = [
        torch.zeros((pages, PAGE_SIZE, width), dtype=env.dtype, device=env.device)
        for width in (own.latent, own.rope)
    ]
    angles = env.random(model.context, own.rope // 2, dtype=torch.float32)
    fixed = (env.ones(own.latent), angles.cos(), angles.sin())

    def run(q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return place(q, kv, *fixed, positions, slots, *caches, EPS)

    def seen(begin: int, end: int, out: Any) -> list[Tensor]:
        written = slots[begin * query_len : end * query_len]
        return [out, *(cache.flatten(0, 1)[written] for cache in caches)]

    size = f"{model.heads} heads, {own.latent} + {own.rope}"
    given = [q, kv, positions, slots]
    return cut_by_tokens(latent_rope_and_cache, size, query_len, backend, run, given, token, seen)


def _attention(model: Model, own: Latent, env: BenchEnv, query_len: int) -> OpBenchmark:
    heads = model.heads
    context = model.context
    traits = dict(heads=heads, latent=own.latent, rope=own.rope)
    backend, attend = env.choose(latent_attention, **traits)
    kept = own.latent + own.rope
    size = env.dtype.itemsize
    columns = -(-context // PAGE_SIZE)
    rows = env.enough(context * kept * size)
    caches = [env.random(rows * columns + 1, PAGE_SIZE, n) for n in (own.latent, own.rope)]
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    table = env.ints(order.view(rows, columns))
    q = [env.random(rows * query_len, heads, width) for width in (own.latent, own.rope)]
    starts = env.ints(torch.full((rows,), context - query_len))
    bounds = env.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        queries = [part[begin * query_len : end * query_len] for part in q]
        places = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(*queries, *caches, *places, query_len, kept**-0.5)

    def cost(rows: int) -> Cost:
        tokens = rows * query_len
        moved = context * kept * rows + tokens * heads * (kept + own.latent)
        return Cost(size * moved, 2 * heads * (kept + own.latent) * context * tokens)

    return OpBenchmark(
        op=latent_attention.name,
        size=f"{heads} heads, {own.latent} + {own.rope}, context {context}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
