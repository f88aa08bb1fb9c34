"""Measures every op by itself: time against the floor of its bytes and flops, and its bits.

A call is timed in a chain over many distinct inputs, since a step finds none of its
weights, pages and states in the cache either. (The activations of a few rows are smaller than that:
they stay in the cache, as they do in a step.)
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

FEWEST_CALLS = {"cuda": 20, "cpu": 2}
OTHER_ROWS = (1, 2, 3, 7, 8, 33)
"""Row counts at which an op is compared with itself, besides those that are timed."""


@dataclass(frozen=True)
class KernelLine:
    """One op at one size and number of rows. of_floor: the floor over the time; compared: row
    counts whose bits were compared with the largest batch's; differing: those that differed."""

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
    """The named models; if none is named, those that fit the device. Raises ConfigError."""
    chosen = list(names) or (["small"] if device == "cpu" else [n for n in MODELS if n != "small"])
    for name in chosen:
        if name not in MODELS:
            raise choice_error(ConfigError, "model", name, ", ".join(MODELS), "Choose one of them.")
    return [MODELS[name] for name in chosen]


def measured_ops() -> list[str]:
    """The ops that are measured: those of the packages that have a bench.py."""
    op_packages = {bench.__name__.rpartition(".")[0] for bench in benchmark_modules()}
    return [name for name, op in all_ops().items() if folder_of(op) in op_packages]


def check_ops(names: Sequence[str]) -> Sequence[str]:
    """The names, if they are all ops that are measured. Raises ConfigError."""
    known = measured_ops()
    for name in names:
        if name not in known:
            raise choice_error(ConfigError, "op", name, ", ".join(known), "Choose one of them.")
    return names


def benchmarks(
    model: ModelShape, env: BenchEnv, query_len: int, only: Sequence[str] = ()
) -> Iterator[OpBenchmark]:
    """Every op of the model (or those named), one at a time, so that only one is in memory."""
    for bench in benchmark_modules():
        made: Iterator[LazyBenchmark] = bench.benchmarks(model, env, query_len)
        for op, make in made:
            if not only or op.name in only:
                yield make()


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
    """A line per op, size, query length and number of rows; `only` names ops, none all. format: of
    keys and values, or latents."""
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
    """Calls on rows and weights that differ, until they have walked through enough bytes."""
    groups = max(benchmark.rows // rows, 1)
    needed = -(-env.chain_bytes // benchmark.cost(rows).bytes)
    most = min(max(groups, benchmark.variants), MAX_CALLS[env.device])
    calls = max(min(needed, most), FEWEST_CALLS[env.device])
    begins = [variant % groups * rows for variant in range(calls)]
    return [benchmark.call(begin, begin + rows, variant) for variant, begin in enumerate(begins)]


def compare_rows(
    benchmark: OpBenchmark, counts: Sequence[int], most: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(row counts compared, those whose bits differ) against the same rows in a batch of `most`.

    Each count is tried at the front and at the back of the batch.
    """
    whole = _results(benchmark, 0, most)
    compared = tuple(count for count in counts if count < most)
    differing = []
    for count in compared:
        for begin in (0, most - count):
            found = _results(benchmark, begin, begin + count)
            wanted = [part[begin : begin + count] for part in whole]
            if not all(_same(a, b) for a, b in zip(found, wanted, strict=True)):
                differing.append(count)
                break
    return compared, tuple(differing)


def _results(benchmark: OpBenchmark, begin: int, end: int) -> list[torch.Tensor]:
    """What a call on these rows leaves, each part [rows, anything]."""
    benchmark.reset()
    parts = benchmark.outputs(begin, end, benchmark.call(begin, end, 0)())
    return [part.reshape(end - begin, -1).clone() for part in parts]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal element for element, NaN where NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
