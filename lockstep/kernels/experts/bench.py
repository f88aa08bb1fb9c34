"""experts: a layer's mixture, its tokens sent to random experts, a shared one's output added."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, Made, Model, Moe, OpBenchmark
from lockstep.kernels.experts import experts

ID_BYTES = 4


def benchmarks(model: Model, env: BenchEnv, query_len: int) -> Iterator[Made]:
    """experts of the model, if it has any."""
    if model.moe:
        yield experts, partial(_experts, model.hidden, model.moe, env, query_len)


def _experts(hidden: int, moe: Moe, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, run = env.choose(experts, experts=moe.experts, top_k=moe.top_k)
    size = env.dtype.itemsize
    expert = 3 * hidden * moe.inner
    rows = env.enough(size * expert * moe.top_k * query_len)
    tokens = rows * query_len
    up = env.random(moe.experts, 2 * moe.inner, hidden).mul_(hidden**-0.5)
    down = env.random(moe.experts, hidden, moe.inner).mul_(moe.inner**-0.5)
    logits = env.random(tokens, moe.experts, dtype=torch.float32)
    values, chosen = logits.softmax(-1).topk(moe.top_k)
    given = (env.ints(chosen), (values / values.sum(-1, keepdim=True)).to(env.dtype))
    x = env.random(tokens, hidden)
    shared = env.random(tokens, hidden)
    gate = env.random(tokens)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        cut = slice(begin * query_len, end * query_len)
        ids, weights = (part[cut] for part in given)
        return lambda: run(x[cut], up, down, ids, weights, shared[cut], gate[cut])

    def cost(rows: int) -> Cost:
        count = rows * query_len
        read = len(given[0][:count].unique())
        brought = (3 * hidden + 1) * size + moe.top_k * (ID_BYTES + size)
        return Cost(size * expert * read + count * brought, 2 * expert * moe.top_k * count)

    return OpBenchmark(
        op=experts.name,
        size=f"{hidden}/{moe.inner}, {moe.top_k} of {moe.experts}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=cost,
    )
