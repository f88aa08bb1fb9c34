"""Benchmarks of mamba2_step and mamba2_chunk."""

from collections.abc import Iterator

from lockstep.kernels.bench_types import BenchEnv, LazyBenchmark, ModelShape
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.mamba2.cases import inputs, weights
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.recurrent.op_benchmarks import RecurrenceOps


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """Yield the benchmarks of a model with Mamba-2 layers: see RecurrenceOps."""
    if model.mamba:
        yield from OPS.benchmarks(model.mamba, env, query_len, model.prompt)


def _traits(dims: Dims) -> dict[str, int]:
    return dict(groups=dims.hk, heads=dims.hv, state_dim=dims.k, head_dim=dims.v, kernel=dims.r + 1)


OPS = RecurrenceOps(mamba2_step, mamba2_chunk, inputs, inputs, weights, _traits, rounded=False)
