"""Tuner of linear's tiles for quantized weights: compare each candidate's bits, then time it.

Tiles affect only the speed. A tile is skipped with a reason if it does not compile, or if its
output differs from that with the weight dequantized beforehand.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.architecture import sm_number
from lockstep.kernels.bench_types import ModelShape
from lockstep.kernels.formats.weights.bench import LAYOUTS
from lockstep.kernels.linear import choose_split_k, quantized_tuning, tuning
from lockstep.kernels.linear.quantized_tuning import QuantizedTile, bucket

TUNED_LAYOUTS = ("int4", "fp8 by blocks", "nvfp4", "int4 asymmetric, fp16 scales")
"""Weight layouts that are tuned; the others get their tiles from a formula."""
MAX_COMPILERS = 16
"""Maximum processes that compile candidates into Triton's cache beforehand."""
ROWS = 256
"""Output features of the weights with which candidates are compiled."""


@dataclass(frozen=True)
class TuningJob:
    """Weight layout and shape at a number of tokens, and the candidate tiles."""

    layout: str
    n: int
    k: int
    tokens: int
    tiles: tuple[QuantizedTile, ...]


@dataclass(frozen=True)
class TuningResult:
    """Measurements of a job.

    key: key in the table. times: (us, tile), fastest first. refused: reason by tile that must not
    be used.
    """

    job: TuningJob
    key: str
    times: list[tuple[float, QuantizedTile]]
    refused: dict[QuantizedTile, str]

    def __str__(self) -> str:
        best = f"{self.times[0][0]:.1f} us {self.times[0][1]}" if self.times else "none serves"
        return f"{self.job.tokens} tokens, {self.job.layout} {self.job.n}x{self.job.k}: {best}"


def tuning_jobs(
    models: Sequence[ModelShape], tokens: Sequence[int], layouts: Sequence[str]
) -> Iterator[list[TuningJob]]:
    """Yield the jobs of all weights except the LM heads, one list per number of tokens."""
    arch = sm_number("cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = sorted({(n, k) for model in models for _, n, k in model.weights[:-1]})
    for num_tokens in tokens:
        jobs = []
        for layout, (n, k) in product(layouts, shapes):
            weight = LAYOUTS[layout](n, k, "meta")
            num_splits = choose_split_k(n, k, "cuda", quantized=True)
            tiles = quantized_tuning.tiles_to_time(num_tokens, weight, num_splits, arch, num_sms)
            jobs.append(TuningJob(layout, n, k, num_tokens, tuple(tiles)))
        yield jobs


def compile_tile(jobs: Sequence[TuningJob], tile: QuantizedTile, dtype: torch.dtype) -> None:
    """Launch a tile once per job, so that its kernels are in Triton's cache.

    A refusal of the tile is ignored here: the measurement checks each tile again.
    """
    from lockstep.kernels.linear.quantized import refusal

    for job in jobs:
        x = torch.zeros(job.tokens, job.k, dtype=dtype, device="cuda")
        weight = LAYOUTS[job.layout](ROWS, job.k, "cuda")
        refusal(
            choose_split_k(job.n, job.k, "cuda", quantized=True), x, weight, x.new_empty(0), tile
        )


def _compile(pool: Executor, jobs: Sequence[TuningJob], dtype: torch.dtype) -> None:
    """Compile the tiles of all jobs in parallel."""
    # One process takes a tile for all K of a layout: most of them share one compiled kernel.
    groups: dict[tuple[str, QuantizedTile], dict[tuple[int, int], TuningJob]] = {}
    for job in jobs:
        num_splits = choose_split_k(job.n, job.k, "cuda", quantized=True)
        for tile in job.tiles:
            groups.setdefault((job.layout, tile), {})[job.k, num_splits] = job
    futures = [
        pool.submit(compile_tile, list(group.values()), tile, dtype)
        for (_, tile), group in groups.items()
    ]
    for future in futures:
        future.result()


def tune_quantized(
    models: Sequence[ModelShape],
    dtype: torch.dtype,
    path: Path,
    tokens: Sequence[int] = quantized_tuning.TIMED,
    layouts: Sequence[str] = TUNED_LAYOUTS,
) -> Iterator[TuningResult]:
    """Tune all weights except the LM heads, and write the best tiles to `path`.

    The file also has the entries of the committed table and its own previous ones. Yields the
    result of each shape: all shapes at the first number of tokens, then at the next. Raises
    ConfigError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device, and none is visible to torch; leave it out.")
    table = {**quantized_tuning.load_table(), **quantized_tuning.load_table(path)}
    workers = min(MAX_COMPILERS, os.cpu_count() or 1)
    residual = {(n, k) for model in models for _, n, k in model.weights if n == model.hidden}
    # A forked process cannot use CUDA after its parent has.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for jobs in tuning_jobs(models, tokens, layouts):
            _compile(pool, jobs, dtype)
            for job in jobs:
                tuned = _tune(job, dtype, (job.n, job.k) in residual)
                if tuned.times:
                    row = table.setdefault(tuned.key, {})
                    row[bucket(job.tokens)] = tuned.times[0][1]
                    # After each shape, so that an interrupted run keeps its measurements.
                    tuning.save_table(table, path)
                yield tuned


def _tune(job: TuningJob, dtype: torch.dtype, residual: bool) -> TuningResult:
    """Measure one job.

    residual: the weight writes to the residual, so the op that reads its output adds the split-K
    partitions.
    """
    from lockstep.kernels.linear.quantized import expected_output, refusal, run_tile

    weights = quantized_tuning.random_weights(partial(LAYOUTS[job.layout], job.n, job.k, "cuda"))
    num_splits = choose_split_k(job.n, job.k, "cuda", quantized=True)
    x = torch.randn(job.tokens, job.k, dtype=dtype, device="cuda")
    find_refusal = partial(
        refusal, num_splits, x, weights[0], expected_output(num_splits, x, weights[0])
    )
    run = partial(run_tile, num_splits, residual)
    timed, refused = quantized_tuning.tune(run, find_refusal, x, weights, job.tiles)
    times = [(1e6 * seconds, tile) for seconds, tile in timed]
    return TuningResult(
        job, quantized_tuning.table_key(weights[0], dtype, sm_number("cuda")), times, refused
    )
