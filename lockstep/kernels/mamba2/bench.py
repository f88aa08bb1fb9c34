"""Both laws of a Mamba-2 mixer."""

from collections.abc import Iterator

from lockstep.kernels.bench_types import BenchEnv, LazyBenchmark, ModelShape
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.mamba2.cases import inputs, weights
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.recurrent.op_benchmarks import Laws


def benchmarks(model: ModelShape, env: BenchEnv, query_len: int) -> Iterator[LazyBenchmark]:
    """See Laws.benchmarks; of models that have such layers."""
    if model.mamba:
        yield from LAWS.benchmarks(model.mamba, env, query_len, model.prompt)


def _traits(dims: Dims) -> dict[str, int]:
    return dict(groups=dims.hk, heads=dims.hv, state_dim=dims.k, head_dim=dims.v, kernel=dims.r + 1)


LAWS = Laws(mamba2_step, mamba2_chunk, inputs, inputs, weights, _traits, rounded=False)
