"""experts: the mixture of one layer, tokens sent to random experts, a shared expert's output added.

On a GPU with quantized weights too.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.bench_types import (
    BenchEnv,
    Cost,
    LazyBenchmark,
    ModelShape,
    MoeShape,
    OpBenchmark,
)
from lockstep.kernels.experts import experts
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.formats.weights.bench import LAYOUTS

ID_BYTES = 4
QUANTIZED = ("int4", "fp8 by blocks")
"""Weight formats that are measured, up and down in the same."""


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield experts of the model, if it has any."""
    if not model.moe:
        return
    for layout in ("", *QUANTIZED) if env.device == "cuda" else ("",):
        sizes = (model.hidden, model.moe, model.gated)
        yield experts, partial(_experts, *sizes, env, query_len, layout)


def _weight(moe: MoeShape, n: int, k: int, env: BenchEnv, layout: str) -> Tensor | QuantizedWeight:
    """Return a weight [experts, n, k], or a quantized one of experts * n rows."""
    if not layout:
        return env.random(moe.experts, n, k).mul_(k**-0.5)
    weight = LAYOUTS[layout](moe.experts * n, k, env.device)
    weight.fill_dummy(torch.Generator(env.device).manual_seed(0))
    return weight


def _experts(
    hidden: int, moe: MoeShape, gated: bool, env: BenchEnv, query_len: int, layout: str
) -> OpBenchmark:
    """Measure one layer. layout: format of the weights, "" for dense ones."""
    act = "silu_mul" if gated else "relu2"
    backend, run = env.choose(experts, experts=moe.experts, top_k=moe.top_k, quantized=bool(layout))
    size = env.dtype.itemsize
    up = _weight(moe, moe.inner * (1 + gated), hidden, env, layout)
    down = _weight(moe, hidden, moe.inner, env, layout)
    expert = (up.nbytes + down.nbytes) // moe.experts
    flops = 2 * (2 + gated) * hidden * moe.inner
    rows = env.rows_per_chain(expert * moe.top_k * query_len)
    tokens = rows * query_len
    logits = env.random(tokens, moe.experts, dtype=torch.float32)
    values, chosen = logits.softmax(-1).topk(moe.top_k)
    routing = (env.ints(chosen), (values / values.sum(-1, keepdim=True)).to(env.dtype))
    x = env.random(tokens, hidden)
    shared = env.random(tokens, hidden)
    gate = env.random(tokens)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        cut = slice(begin * query_len, end * query_len)
        ids, weights = (part[cut] for part in routing)
        return lambda: run(x[cut], up, down, ids, weights, shared[cut], gate[cut], act)

    def cost(rows: int) -> Cost:
        count = rows * query_len
        read = len(routing[0][:count].unique())
        brought = (3 * hidden + 1) * size + moe.top_k * (ID_BYTES + size)
        return Cost(expert * read + count * brought, flops * moe.top_k * count)

    return OpBenchmark(
        op=experts.name,
        size=f"{layout} {hidden}/{moe.inner}, {moe.top_k} of {moe.experts}".lstrip(),
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
