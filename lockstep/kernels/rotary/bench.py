"""Benchmark of rope_and_cache: norms, rotation and the write to the cache, a slot per token."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.bench_types import (
    EPS,
    BenchEnv,
    LazyBenchmark,
    ModelShape,
    OpBenchmark,
    benchmark_per_token,
)
from lockstep.kernels.rotary import rope_and_cache
from lockstep.step import PAGE_SIZE


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield rope_and_cache of the model's attention."""
    if model.kv_heads:
        yield rope_and_cache, partial(_rope_and_cache, model, env, query_len)


def _rope_and_cache(model: ModelShape, env: BenchEnv, query_len: int) -> OpBenchmark:
    """Build the benchmark, with enough tokens for their data to exceed the L2."""
    backend, rope = env.choose(rope_and_cache, head_dim=model.head_dim)
    kv_heads = model.kv_heads
    dim = model.head_dim
    token = 2 * (model.heads + 2 * kv_heads) * dim * env.dtype.itemsize
    tokens = env.rows_per_chain(token * query_len) * query_len
    qkv = env.random(tokens, (model.heads * (1 + model.gate) + 2 * kv_heads) * dim)
    slots = env.ints(torch.randperm(tokens) + PAGE_SIZE, torch.int64)
    positions = env.ints(torch.arange(tokens) % model.context, torch.int64)
    shape = (-(-tokens // PAGE_SIZE) + 1, PAGE_SIZE, kv_heads, dim)
    caches = [torch.zeros(shape, dtype=env.dtype, device=env.device) for _ in range(2)]
    weight = env.ones(dim)
    angles = env.random(model.context, dim // 2, dtype=torch.float32)
    fixed = (weight, weight, angles.cos(), angles.sin())

    def run(qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return rope(qkv, *fixed, positions, slots, *caches, EPS, 0.0, gated=model.gate)

    def written_numbers(begin: int, end: int, out: Any) -> list[Tensor]:
        written = slots[begin * query_len : end * query_len]
        return [out, *(cache.flatten(0, 1)[written] for cache in caches)]

    size = f"{model.heads}/{kv_heads}x{dim}"
    inputs = [qkv, positions, slots]
    return benchmark_per_token(
        rope_and_cache, size, query_len, backend, run, inputs, token, written_numbers
    )
