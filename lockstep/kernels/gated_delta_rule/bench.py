"""Benchmarks of gated_delta_step and gated_delta_chunk."""

from collections.abc import Iterator

from lockstep.kernels.bench_types import BenchEnv, LazyBenchmark, ModelShape
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.gated_delta_rule.cases import chunk_inputs, inputs, weights
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.recurrent.op_benchmarks import RecurrenceOps


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield the benchmarks of a model with Gated DeltaNet layers: see RecurrenceOps."""
    if model.delta:
        yield from OPS.benchmarks(model.delta, env, query_len, model.prompt)


def _traits(dims: Dims) -> dict[str, int]:
    heads = dict(key_heads=dims.hk, value_heads=dims.hv)
    return dict(key_dim=dims.k, value_dim=dims.v, **heads, kernel=dims.r + 1)


OPS = RecurrenceOps(
    gated_delta_step, gated_delta_chunk, inputs, chunk_inputs, weights, _traits, rounded=True
)
