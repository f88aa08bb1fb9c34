"""Microbenchmarks of every op: time against its roofline floor, and batch invariance of its bits.

Calls are timed in a chain over distinct inputs that exceed the L2 cache, because a step does not
find its weights, pages and states in that cache either. The activations of a few rows stay in the
cache, as they do in a step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lockstep.bench.dimensions import MODELS, bench_env
from lockstep.errors import ConfigError, choice_error
from lockstep.kernels.backends import all_ops, benchmark_modules, folder_of
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.bench_types import MAX_CALLS, BenchEnv, LazyBenchmark, ModelShape, OpBenchmark
from lockstep.kernels.formats.kv import KVFormat
from lockstep.kernels.timing import REPEATS, seconds_per_call
from lockstep.worker.roofline import Part

MIN_CALLS = {"cuda": 20, "cpu": 2}
"""Minimum calls of a timed chain, by device."""
OTHER_ROWS = (1, 2, 3, 7, 8, 33)
"""Row counts at which an op's bits are compared, in addition to those that are timed."""


@dataclass(frozen=True)
class KernelLine:
    """Measurement of an op at one size and number of rows.

    us: time of a call. bytes: bytes that a call must move. of_floor: floor divided by the time.
    compared: row counts whose bits were compared with the largest batch's. differing: those of
    them whose bits differ.
    """

    model: str
    op: str
    size: str
    backend: str
    rows: int
    query_len: int
    us: float
    bytes: int
    tb_per_s: float
    of_floor: float
    compared: tuple[int, ...]
    differing: tuple[int, ...]


def pick_models(names: Sequence[str], device: str) -> list[ModelShape]:
    """Return the named models, or by default those that suit the device. Raises ConfigError."""
    chosen = list(names) or (["small"] if device == "cpu" else [n for n in MODELS if n != "small"])
    for name in chosen:
        if name not in MODELS:
            raise choice_error(ConfigError, "model", name, ", ".join(MODELS), "Choose one of them.")
    return [MODELS[name] for name in chosen]


def measured_ops() -> list[str]:
    """Return the names of the ops with benchmarks: those of packages with a bench.py."""
    op_packages = {bench.__name__.rpartition(".")[0] for bench in benchmark_modules()}
    return [name for name, op in all_ops().items() if folder_of(op) in op_packages]


def check_ops(names: Sequence[str]) -> Sequence[str]:
    """Return the names. Raises ConfigError if one is no op with benchmarks."""
    known = measured_ops()
    for name in names:
        if name not in known:
            raise choice_error(ConfigError, "op", name, ", ".join(known), "Choose one of them.")
    return names


def benchmarks(
    model: ModelShape, env: BenchEnv, query_len: int, only: Sequence[str] = ()
) -> Iterator[OpBenchmark]:
    """Yield the benchmarks of a model's ops, or of the ops in `only`.

    Each is created when it is yielded, so that only one is in memory.
    """
    for bench in benchmark_modules():
        lazy_benchmarks: Iterator[LazyBenchmark] = bench.benchmarks(model, env, query_len)
        for op, create in lazy_benchmarks:
            if not only or op.name in only:
                yield create()


@torch.inference_mode()
def measure_kernels(
    models: Sequence[ModelShape],
    device: str,
    dtype: torch.dtype,
    rows: Sequence[int] = (1, 8, 64),
    query_lens: Sequence[int] = (1, 4),
    only: Sequence[str] = (),
    repeats: int | None = None,
    format: KVFormat | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[KernelLine]:
    """Yield a line per op, size, query length and number of rows.

    only: names of ops, empty for all. format: format of the KV cache or of MLA latents. Raises
    ConfigError for an unknown op.
    """
    check_ops(only)
    load_backends()
    repeats = repeats or REPEATS[device]
    env = bench_env(device, dtype, max(rows), format)
    for model in models:
        for query_len in query_lens:
            for benchmark in benchmarks(model, env, query_len, only):
                progress(f"{model.name} {benchmark.op} {benchmark.size}")
                bits = compare_rows(benchmark, sorted({*rows, *OTHER_ROWS}), env.max_rows)
                for count in rows:
                    yield _line(model, benchmark, count, env, repeats, *bits)


def _line(
    model: ModelShape,
    benchmark: OpBenchmark,
    rows: int,
    env: BenchEnv,
    repeats: int,
    compared: tuple[int, ...],
    differing: tuple[int, ...],
) -> KernelLine:
    seconds = seconds_per_call(_chain(benchmark, rows, env), env.device, repeats)
    cost = benchmark.cost(rows)
    part = Part(benchmark.size, cost.bytes, cost.flops)
    floor = max(part.memory_ms, part.matrix_ms) / 1e3
    return KernelLine(
        model=model.name,
        op=benchmark.op,
        size=benchmark.size,
        backend=benchmark.backend,
        rows=rows,
        query_len=benchmark.query_len,
        us=1e6 * seconds,
        bytes=cost.bytes,
        tb_per_s=cost.bytes / seconds / 1e12,
        of_floor=floor / seconds,
        compared=compared,
        differing=differing,
    )


def _chain(benchmark: OpBenchmark, rows: int, env: BenchEnv) -> list[Callable[[], object]]:
    """Return calls on distinct rows and weights that together read more than the L2 cache."""
    num_groups = max(benchmark.rows // rows, 1)
    num_needed = -(-env.chain_bytes // benchmark.cost(rows).bytes)
    max_distinct = min(max(num_groups, benchmark.variants), MAX_CALLS[env.device])
    num_calls = max(min(num_needed, max_distinct), MIN_CALLS[env.device])
    starts = [variant % num_groups * rows for variant in range(num_calls)]
    return [benchmark.call(start, start + rows, variant) for variant, start in enumerate(starts)]


def compare_rows(
    benchmark: OpBenchmark, counts: Sequence[int], max_rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compare the bits of small batches with those of the same rows in a batch of `max_rows`.

    Each count is tried with the first and with the last rows. Returns (row counts that were
    compared, those whose bits differ).
    """
    expected_results = _results(benchmark, 0, max_rows)
    compared = tuple(count for count in counts if count < max_rows)
    differing = []
    for count in compared:
        # A kernel may treat a row by its position in a tile, so both ends are tried.
        for start in (0, max_rows - count):
            actual = _results(benchmark, start, start + count)
            expected = [part[start : start + count] for part in expected_results]
            if not all(_same(a, b) for a, b in zip(actual, expected, strict=True)):
                differing.append(count)
                break
    return compared, tuple(differing)


def _results(benchmark: OpBenchmark, start: int, end: int) -> list[torch.Tensor]:
    """Return copies of the outputs and updated caches of a call, each as [rows, elements]."""
    # Ops that update a state must start from the same one.
    benchmark.reset()
    tensors = benchmark.outputs(start, end, benchmark.call(start, end, 0)())
    return [tensor.reshape(end - start, -1).clone() for tensor in tensors]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all elements are equal; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
