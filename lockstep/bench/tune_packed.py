"""Makes the table of linear's tiles with packed weights: candidates compared, then timed.

A tile decides the speed and nothing else; one that does not compile, or has other bits than the
weight unpacked ahead, is named and left out.
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

TUNED = ("int4", "fp8 by blocks", "nvfp4", "int4 asymmetric, fp16 scales")
"""Layouts that are tuned; others follow the rule."""
COMPILERS = 16
"""Processes that compile candidates ahead, into Triton's cache."""
ROWS = 256
"""Outputs of the weights that they launch with."""


@dataclass(frozen=True)
class Job:
    """A layout and shape at a number of tokens, and the tiles that are worth timing."""

    layout: str
    n: int
    k: int
    tokens: int
    tiles: tuple[QuantizedTile, ...]


@dataclass(frozen=True)
class Tuned:
    """What was measured. key, tokens: of the table; times: (us, tile), fastest first; refused: the
    tiles that must not be used, with the reason."""

    job: Job
    key: str
    times: list[tuple[float, QuantizedTile]]
    refused: dict[QuantizedTile, str]

    def __str__(self) -> str:
        best = f"{self.times[0][0]:.1f} us {self.times[0][1]}" if self.times else "none serves"
        return f"{self.job.tokens} tokens, {self.job.layout} {self.job.n}x{self.job.k}: {best}"


def jobs(
    models: Sequence[ModelShape], tokens: Sequence[int], layouts: Sequence[str]
) -> Iterator[list[Job]]:
    """Of every weight but the heads, for each number of tokens. Nothing is allocated."""
    arch = sm_number("cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = sorted({(n, k) for model in models for _, n, k in model.weights[:-1]})
    for count in tokens:
        found = []
        for layout, (n, k) in product(layouts, shapes):
            weight = LAYOUTS[layout](n, k, "meta")
            parts = choose_split_k(n, k, "cuda", quantized=True)
            tiles = quantized_tuning.tiles_to_time(count, weight, parts, arch, processors)
            found.append(Job(layout, n, k, count, tuple(tiles)))
        yield found


def compile_tile(todo: Sequence[Job], tile: QuantizedTile, dtype: torch.dtype) -> None:
    """Launches a tile once for each of these, so that its kernels are in Triton's cache; refusals
    are named later."""
    from lockstep.kernels.linear.quantized import refusal

    for job in todo:
        x = torch.zeros(job.tokens, job.k, dtype=dtype, device="cuda")
        weight = LAYOUTS[job.layout](ROWS, job.k, "cuda")
        refusal(
            choose_split_k(job.n, job.k, "cuda", quantized=True), x, weight, x.new_empty(0), tile
        )


def _compile(pool: Executor, todo: Sequence[Job], dtype: torch.dtype) -> None:
    """All their tiles. One process takes a tile for all K of a layout, since most of these differ
    in nothing that a kernel is compiled for."""
    groups: dict[tuple[str, QuantizedTile], dict[tuple[int, int], Job]] = {}
    for job in todo:
        parts = choose_split_k(job.n, job.k, "cuda", quantized=True)
        for tile in job.tiles:
            groups.setdefault((job.layout, tile), {})[job.k, parts] = job
    found = [
        pool.submit(compile_tile, list(group.values()), tile, dtype)
        for (_, tile), group in groups.items()
    ]
    for future in found:
        future.result()


def tune_packed(
    models: Sequence[ModelShape],
    dtype: torch.dtype,
    path: Path,
    tokens: Sequence[int] = quantized_tuning.TIMED,
    layouts: Sequence[str] = TUNED,
) -> Iterator[Tuned]:
    """Times tiles at every weight but the heads, and writes the best to `path`, over what stands
    there or in the committed table; yields what was measured, shape by shape.

    All shapes at the first number of tokens come first. The file is written after every shape, so
    what is measured stays where the rest is cut off. Raises ConfigError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device, and none is visible to torch; leave it out.")
    table = {**quantized_tuning.load_table(), **quantized_tuning.load_table(path)}
    workers = min(COMPILERS, os.cpu_count() or 1)
    residual = {(n, k) for model in models for _, n, k in model.weights if n == model.hidden}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for todo in jobs(models, tokens, layouts):
            _compile(pool, todo, dtype)
            for job in todo:
                tuned = _tune(job, dtype, (job.n, job.k) in residual)
                if tuned.times:
                    row = table.setdefault(tuned.key, {})
                    row[bucket(job.tokens)] = tuned.times[0][1]
                    tuning.save_table(table, path)
                yield tuned


def _tune(job: Job, dtype: torch.dtype, residual: bool) -> Tuned:
    """residual: the reader adds the parts of K."""
    from lockstep.kernels.linear.quantized import expected_output, refusal, run_tile

    weights = quantized_tuning.random_weights(partial(LAYOUTS[job.layout], job.n, job.k, "cuda"))
    parts = choose_split_k(job.n, job.k, "cuda", quantized=True)
    x = torch.randn(job.tokens, job.k, dtype=dtype, device="cuda")
    wrong = partial(refusal, parts, x, weights[0], expected_output(parts, x, weights[0]))
    run = partial(run_tile, parts, residual)
    found, refused = quantized_tuning.tune(run, wrong, x, weights, job.tiles)
    times = [(1e6 * seconds, tile) for seconds, tile in found]
    return Tuned(
        job, quantized_tuning.table_key(weights[0], dtype, sm_number("cuda")), times, refused
    )
