"""Benchmarks of sample: greedy rows, rows with temperature, rows with top-p too."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.bench_types import BenchEnv, Cost, LazyBenchmark, ModelShape, OpBenchmark
from lockstep.kernels.sampling import FILTERS, NOISE, SamplingState, sample

SETTINGS = {0: "greedy", NOISE: "T 0.8", NOISE | FILTERS: "T 0.8, top_p 0.95"}
"""Flags of all rows, and the name of the setting."""


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield sample over the model's vocabulary with each of SETTINGS."""
    for flags in SETTINGS:
        yield sample, partial(_sample, model.vocab, flags, env, query_len)


def _sample(vocab: int, flags: int, env: BenchEnv, query_len: int) -> OpBenchmark:
    backend, run = env.choose(sample, vocab=vocab)
    rows = env.rows_per_chain(4 * vocab * query_len)
    state = SamplingState.empty(env.max_rows + 1, vocab, 20, (32, 8), env.device)
    state.flags[1:] = flags
    state.temperature[1:] = 0.8
    state.top_p[1:] = 0.95
    state.seed[1:] = torch.arange(env.max_rows)
    logits = env.random(rows, query_len, vocab, dtype=torch.float32)
    first = env.ints(torch.arange(rows)[:, None] % 50 + 8, torch.int64)
    positions = first + torch.arange(query_len, device=env.device)
    drafts = torch.full((rows, query_len - 1), -1, dtype=torch.int64, device=env.device)
    row_ids = env.ints(torch.arange(rows) % env.max_rows + 1, torch.int64)
    history = torch.zeros(env.max_rows + 1, 64, dtype=torch.int64, device=env.device)

    def call(begin: int, end: int, variant: int) -> Callable[[], Tensor]:
        arguments = [x[begin:end] for x in (logits, positions, drafts, row_ids)]
        return lambda: run(*arguments, history, state)

    return OpBenchmark(
        op=sample.name,
        size=f"{SETTINGS[flags]}, {vocab}",
        query_len=query_len,
        backend=backend,
        rows=rows,
        call=call,
        cost=lambda rows: Cost(4 * vocab * query_len * rows),
    )
