"""What `lockstep bench kernels` measures: every op at the dimensions that real models call it with.

A subject holds more rows than a call takes, so that calls can walk through distinct memory; all of
its rows bring the same number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lockstep.bench.dimensions import Model, Setting, Subject
from lockstep.bench.floor import WHOLE, Part
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaState,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.cases import Dims, empty_state, inputs
from lockstep.kernels.sampling import FILTERS, NOISE, SamplingState, sample
from lockstep.layers.linear import Linear
from lockstep.layers.norm import GatedRMSNorm, RMSNorm

OPS = (
    "linear",
    "rms_norm",
    "paged_attention",
    "gated_rms_norm",
    "gated_delta_step",
    "gated_delta_chunk",
    "sample",
)
PAGE_SIZE = 64
EPS = 1e-6


def subjects(
    model: Model, setting: Setting, query_len: int, only: Sequence[str] = ()
) -> Iterator[Subject]:
    """Every op of the model (or those named), one at a time, so that only one is in memory."""
    common = (setting, query_len)
    makers: list[tuple[str, Callable[[], Subject]]] = [
        *(("linear", partial(_linear, *weight, *common)) for weight in model.weights),
        ("rms_norm", partial(_rms_norm, model.hidden, *common)),
        ("paged_attention", partial(_attention, model, *common)),
    ]
    if model.delta:
        dims = replace(model.delta, w=query_len)
        makers.append(("gated_rms_norm", partial(_gated_rms_norm, dims, *common)))
        makers.append(("gated_delta_step", partial(_delta_step, dims, *common)))
        if query_len == 1:
            chunk = partial(_delta_chunk, dims, setting, model.prompt)
            makers.append(("gated_delta_chunk", chunk))
    for flags in (0, NOISE, NOISE | FILTERS):
        makers.append(("sample", partial(_sample, model.vocab, flags, *common)))
    for op, make in makers:
        if not only or op in only:
            yield make()


def _linear(name: str, n: int, k: int, setting: Setting, query_len: int) -> Subject:
    build = setting.build()
    size = setting.dtype.itemsize
    variants = min(-(-setting.rotate // (n * k * size)) + 1, 64)
    layers = [Linear(build, k, n) for _ in range(variants)]
    for layer in layers:
        layer.weight.data.normal_(0.0, k**-0.5)
    x = setting.random(setting.most * query_len, k)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        layer, rows = layers[turn % variants], x[begin * query_len : end * query_len]
        return lambda: layer(rows)

    def cost(rows: int) -> Part:
        tokens = rows * query_len
        return Part(name, size * (n * k + tokens * (n + k)), 2 * n * k * tokens)

    return Subject(
        op="linear",
        size=f"{name} {n}x{k}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=setting.most,
        call=call,
        cost=cost,
        variants=variants,
    )


def _rms_norm(width: int, setting: Setting, query_len: int) -> Subject:
    build = setting.build()
    norm = RMSNorm(build, width, EPS)
    norm.weight.data.fill_(1.0)
    token = 2 * width * setting.dtype.itemsize
    x = setting.random(setting.enough(token * query_len) * query_len, width)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        rows = x[begin * query_len : end * query_len]
        return lambda: norm(rows)

    return Subject(
        op="rms_norm",
        size=str(width),
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=x.shape[0] // query_len,
        call=call,
        cost=lambda rows: Part("", rows * query_len * token),
    )


def _gated_rms_norm(dims: Dims, setting: Setting, query_len: int) -> Subject:
    build = setting.build()
    norm = GatedRMSNorm(build, dims.v, EPS)
    norm.weight.data.fill_(1.0)
    token = dims.hv * dims.v * (4 + 2 * setting.dtype.itemsize)
    tokens = setting.enough(token * query_len) * query_len
    x = setting.random(tokens, dims.hv, dims.v, dtype=torch.float32)
    gate = setting.random(tokens, dims.hv, dims.v)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        rows = slice(begin * query_len, end * query_len)
        return lambda: norm(x[rows], gate[rows])

    return Subject(
        op="gated_rms_norm",
        size=f"{dims.hv}x{dims.v}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=tokens // query_len,
        call=call,
        cost=lambda rows: Part("", rows * query_len * token),
    )


def _attention(model: Model, setting: Setting, query_len: int) -> Subject:
    heads, kv_heads, dim, context = model.heads, model.kv_heads, model.head_dim, model.context
    build = setting.build()
    attend = build.op(paged_attention, heads=heads, kv_heads=kv_heads, head_dim=dim)
    columns, size = -(-context // PAGE_SIZE), setting.dtype.itemsize
    rows = setting.enough(2 * context * kv_heads * dim * size)
    k, v = (setting.random(rows * columns + 1 + i, PAGE_SIZE, kv_heads, dim)[i:] for i in range(2))
    order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0)) + 1
    table = setting.ints(order.view(rows, columns))
    q = setting.random(rows * query_len, heads, dim)
    starts = setting.ints(torch.full((rows,), context - query_len))
    bounds = setting.ints(torch.arange(rows + 1) * query_len)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        tokens = q[begin * query_len : end * query_len]
        places = (table[begin:end], bounds[: end - begin + 1], starts[begin:end])
        return lambda: attend(tokens, k, v, *places, query_len, dim**-0.5)

    def cost(rows: int) -> Part:
        tokens = rows * query_len
        moved = 2 * context * kv_heads * dim * rows + 2 * tokens * heads * dim
        return Part("", size * moved, 4 * context * heads * dim * tokens)

    return Subject(
        op="paged_attention",
        size=f"{heads}/{kv_heads}x{dim}, context {context}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=cost,
    )


def _state(dims: Dims, rows: int, setting: Setting) -> tuple[GatedDeltaState, list[Tensor]]:
    """A state of `rows` slots and the null one, and its parts as they were."""
    state = empty_state(dims, rows + 1, setting.dtype)
    for name, part in vars(state).items():
        values = setting.random(*part.shape, dtype=part.dtype).mul_(0.3)
        setattr(state, name, torch.exp(-values.abs()) if name == "decay" else values)
    return state, [part.clone() for part in state.tensors()]


def _row_bytes(state: GatedDeltaState, query_len: int) -> int:
    """What a step reads of a row's state, and as much again it writes: as the floor counts it."""
    lines = [part[0, :query_len] for name, part in vars(state).items() if name != WHOLE]
    return sum(part.numel() * part.itemsize for part in (state.recurrent[0], *lines))


def _delta_step(dims: Dims, setting: Setting, query_len: int) -> Subject:
    build = setting.build(dims.w)
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    step = build.op(gated_delta_step, **traits, kernel=dims.r + 1)
    rows = setting.enough(4 * dims.hv * dims.k * dims.v)
    state, kept = _state(dims, rows, setting)
    given = {n: x.to(setting.device) for n, x in _delta_inputs(dims, rows, query_len, setting)}
    slots = setting.ints(torch.randperm(rows) + 1, torch.int64)
    pending = setting.ints(torch.arange(rows) % (dims.w + 1), torch.int64)
    weight = given.pop("conv_weight")

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        mixed, g, beta = (given[name][begin:end] for name in ("mixed", "g", "beta"))
        places = (slots[begin:end], pending[begin:end])
        return lambda: step(mixed, g, beta, weight, state, *places)

    def cost(rows: int) -> Part:
        brought = sum(x[0].numel() * x.itemsize for x in given.values())
        out = 4 * query_len * dims.hv * dims.v
        return Part("", rows * (2 * _row_bytes(state, query_len) + brought + out))

    return Subject(
        op="gated_delta_step",
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: _restore(state, kept),
    )


def _delta_chunk(dims: Dims, setting: Setting, length: int) -> Subject:
    build = setting.build(dims.w)
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    chunk = build.op(gated_delta_chunk, **traits, kernel=dims.r + 1)
    rows = setting.most
    state, kept = _state(dims, rows, setting)
    given = {n: x.to(setting.device) for n, x in _delta_inputs(dims, rows, length, setting)}
    weight = given.pop("conv_weight")
    slots = setting.ints(torch.randperm(rows) + 1)
    bounds = setting.ints(torch.arange(rows + 1) * length)
    starts, none = torch.full_like(slots, PAGE_SIZE), torch.zeros_like(slots)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        mixed, g, beta = (given[n][begin:end].flatten(0, 1) for n in ("mixed", "g", "beta"))
        own = slots[begin:end]
        places = (bounds[: end - begin + 1], starts[begin:end], own, own, none[begin:end])
        return lambda: chunk(mixed, g, beta, weight, state, *places)

    def cost(rows: int) -> Part:
        brought = sum(x[0].numel() * x.itemsize for x in given.values())
        out = 4 * length * dims.hv * dims.v
        return Part("", rows * (2 * 4 * dims.hv * dims.k * dims.v + brought + out))

    return Subject(
        op="gated_delta_chunk",
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}",
        query_len=length,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: _restore(state, kept),
    )


def _delta_inputs(
    dims: Dims, rows: int, length: int, setting: Setting
) -> Iterator[tuple[str, Tensor]]:
    """mixed, g, beta [rows, length, ...] and conv_weight, drawn on the device."""
    one = inputs(dims, (1, 1), setting.dtype, seed=0)
    for name, like in one.items():
        if name == "conv_weight":
            yield name, like
            continue
        values = setting.random(rows, length, *like.shape[2:], dtype=like.dtype)
        if name == "g":
            values = values.abs_().mul_(-0.1)
        yield name, torch.sigmoid(values) if name == "beta" else values


def _restore(state: GatedDeltaState, kept: list[Tensor]) -> None:
    for part, value in zip(state.tensors(), kept, strict=True):
        part.copy_(value)


def _sample(vocab: int, flags: int, setting: Setting, query_len: int) -> Subject:
    build = setting.build()
    run = build.op(sample, vocab=vocab)
    rows = setting.enough(4 * vocab * query_len)
    lines = SamplingState.empty(setting.most + 1, vocab, 20, (32, 8), setting.device)
    lines.flags[1:], lines.temperature[1:], lines.top_p[1:] = flags, 0.8, 0.95
    lines.seed[1:] = torch.arange(setting.most)
    logits = setting.random(rows, query_len, vocab, dtype=torch.float32)
    first = setting.ints(torch.arange(rows)[:, None] % 50 + 8, torch.int64)
    positions = first + torch.arange(query_len, device=setting.device)
    drafts = torch.full((rows, query_len - 1), -1, dtype=torch.int64, device=setting.device)
    row_ids = setting.ints(torch.arange(rows) % setting.most + 1, torch.int64)
    history = torch.zeros(setting.most + 1, 64, dtype=torch.int64, device=setting.device)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        given = [x[begin:end] for x in (logits, positions, drafts, row_ids)]
        return lambda: run(*given, history, lines)

    title = {0: "greedy", NOISE: "T 0.8"}.get(flags, "T 0.8, top_p 0.95")
    return Subject(
        op="sample",
        size=f"{title}, {vocab}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=lambda rows: Part("", 4 * vocab * query_len * rows),
    )
