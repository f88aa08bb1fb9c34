"""What `lockstep bench kernels` measures: every op at the dimensions that real models call it with.

A subject holds more rows than a call takes, so that calls can walk through distinct memory; all of
its rows bring the same number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.bench import recurrent, rowwise
from lockstep.bench.dimensions import Model, Setting, Subject
from lockstep.bench.floor import Part
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.sampling import FILTERS, NOISE, SamplingState, sample
from lockstep.layers.linear import Linear, probe
from lockstep.step import PAGE_SIZE

OPS = (
    "linear",
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "rope_and_cache",
    "paged_attention",
    "gated_delta_step",
    "gated_delta_chunk",
    "gated_rms_norm",
    "sample",
)


def subjects(
    model: Model, setting: Setting, query_len: int, only: Sequence[str] = ()
) -> Iterator[Subject]:
    """Every op of the model (or those named), one at a time, so that only one is in memory."""
    common = (setting, query_len)
    makers: list[tuple[str, Callable[[], Subject]]] = [
        *(("linear", partial(_linear, *weight, *common)) for weight in model.weights),
        ("rms_norm", partial(rowwise.norm, model.hidden, *common)),
        ("add_rms_norm", partial(rowwise.add_norm, model.hidden, *common)),
        ("silu_mul", partial(rowwise.activation, model.inner, *common)),
        ("rope_and_cache", partial(rowwise.rope, model, *common)),
        ("paged_attention", partial(_attention, model, *common)),
    ]
    if model.delta:
        dims = replace(model.delta, w=query_len)
        makers.append(("gated_delta_step", partial(recurrent.delta_step, dims, *common)))
        makers.append(("gated_rms_norm", partial(rowwise.gated_norm, dims, *common)))
        if query_len == 1:
            chunk = partial(recurrent.delta_chunk, dims, setting, model.prompt)
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
    probe(build, nn.ModuleList(layers), [setting.most * query_len])
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
