"""The ops that look at one token at a time, as subjects of `lockstep bench kernels`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.dimensions import Model, Setting, Subject
from lockstep.bench.floor import Part
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.gated_delta_rule.cases import Dims
from lockstep.kernels.rotary import rope_and_cache
from lockstep.layers.build import Build
from lockstep.layers.norm import AddRMSNorm, GatedRMSNorm, RMSNorm
from lockstep.step import PAGE_SIZE

EPS = 1e-6


def norm(width: int, setting: Setting, query_len: int) -> Subject:
    """rms_norm of hidden states."""
    build = setting.build()
    layer = RMSNorm(build, width, EPS)
    layer.weight.data.fill_(1.0)
    token = 2 * width * setting.dtype.itemsize
    x = setting.random(setting.enough(token * query_len) * query_len, width)
    return _subject("rms_norm", f"{width}", query_len, build, layer, [x], token)


def add_norm(width: int, setting: Setting, query_len: int) -> Subject:
    """add_rms_norm of hidden states and what is added to them."""
    build = setting.build()
    layer = AddRMSNorm(build, width, EPS)
    layer.weight.data.fill_(1.0)
    token = 4 * width * setting.dtype.itemsize
    tokens = setting.enough(token * query_len) * query_len
    given = [setting.random(tokens, width), setting.random(tokens + 1, width)[1:]]
    return _subject("add_rms_norm", f"{width}", query_len, build, layer, given, token)


def gated_norm(dims: Dims, setting: Setting, query_len: int) -> Subject:
    """gated_rms_norm of a Gated DeltaNet layer's heads."""
    build = setting.build()
    layer = GatedRMSNorm(build, dims.v, EPS)
    layer.weight.data.fill_(1.0)
    token = dims.hv * dims.v * (4 + 2 * setting.dtype.itemsize)
    tokens = setting.enough(token * query_len) * query_len
    x = setting.random(tokens, dims.hv, dims.v, dtype=torch.float32)
    given = [x, setting.random(tokens, dims.hv, dims.v)]
    size = f"{dims.hv}x{dims.v}"
    return _subject("gated_rms_norm", size, query_len, build, layer, given, token)


def activation(inner: int, setting: Setting, query_len: int) -> Subject:
    """silu_mul between gate_up and down."""
    build = setting.build()
    run = build.op(silu_mul)
    token = 3 * inner * setting.dtype.itemsize
    x = setting.random(setting.enough(token * query_len) * query_len, 2 * inner)
    return _subject("silu_mul", f"{inner}", query_len, build, run, [x], token)


def rope(model: Model, setting: Setting, query_len: int) -> Subject:
    """rope_and_cache: norms, rotation and the write to the cache, every token to a slot."""
    build = setting.build()
    run = build.op(rope_and_cache, head_dim=model.head_dim)
    kv_heads, dim = model.kv_heads, model.head_dim
    token = 2 * (model.heads + 2 * kv_heads) * dim * setting.dtype.itemsize
    tokens = setting.enough(token * query_len) * query_len
    qkv = setting.random(tokens, (model.heads * (1 + model.gate) + 2 * kv_heads) * dim)
    slots = setting.ints(torch.randperm(tokens) + PAGE_SIZE, torch.int64)
    positions = setting.ints(torch.arange(tokens) % model.context, torch.int64)
    shape = (-(-tokens // PAGE_SIZE) + 1, PAGE_SIZE, kv_heads, dim)
    caches = [torch.zeros(shape, dtype=setting.dtype, device=setting.device) for _ in range(2)]
    ones = torch.ones(dim, dtype=setting.dtype, device=setting.device)
    angles = setting.random(model.context, dim // 2, dtype=torch.float32)
    fixed = (ones, ones, angles.cos(), angles.sin())

    def turned(qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return run(qkv, *fixed, positions, slots, *caches, EPS, 0.0, gated=model.gate)

    def seen(begin: int, end: int, out: Any) -> list[Tensor]:
        written = slots[begin * query_len : end * query_len]
        return [out, *(cache.flatten(0, 1)[written] for cache in caches)]

    size = f"{model.heads}/{kv_heads}x{dim}"
    given = [qkv, positions, slots]
    return _subject("rope_and_cache", size, query_len, build, turned, given, token, seen)


def _all(begin: int, end: int, out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def _subject(
    op: str,
    size: str,
    query_len: int,
    build: Build,
    run: Callable[..., Any],
    given: Sequence[Tensor],
    token_bytes: int,
    seen: Callable[[int, int, Any], list[Tensor]] = _all,
) -> Subject:
    """An op whose arguments are cut by tokens; build: what chose its backend."""

    def call(begin: int, end: int, turn: int) -> Callable[[], Any]:
        rows = [x[begin * query_len : end * query_len] for x in given]
        return lambda: run(*rows)

    return Subject(
        op=op,
        size=size,
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=given[0].shape[0] // query_len,
        call=call,
        cost=lambda rows: Part("", rows * query_len * token_bytes),
        seen=seen,
    )
