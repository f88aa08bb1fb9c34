"""Makes the table of linear's tiles with packed weights: every candidate compared, then timed.

A tile decides the speed and nothing else; one that does not compile, or has other bits than the
weight unpacked ahead, is named and left out.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.bench_types import Model
from lockstep.kernels.linear import packed_tuning, segments, tuning
from lockstep.kernels.linear.packed_tuning import PackedTile
from lockstep.kernels.packed.bench import LAYOUTS

TUNED = ("int4", "int4 asymmetric, fp16 scales", "fp8 by blocks", "nvfp4")
"""Layouts that are tuned; others follow the rule."""
COMPILERS = 16
"""Processes that compile candidates ahead, into Triton's cache."""
ROWS = 256
"""Outputs of the weights that they launch with."""
Times = dict[str, dict[int, list[tuple[float, str]]]]


def compile_tile(layout: str, k: int, parts: int, tokens: int, tile: PackedTile) -> None:
    """Launches a tile once, so that its kernel is in Triton's cache; refusals are named later."""
    from lockstep.kernels.linear.packed import refusal

    x = torch.zeros(tokens, k, dtype=torch.bfloat16, device="cuda")
    refusal(parts, x, LAYOUTS[layout](ROWS, k, "cuda"), tile)


def _compile(pool: ProcessPoolExecutor, layout: str, shapes: Sequence[tuple[int, int]]) -> None:
    """All candidates of a layout, one per kernel that differs."""
    jobs = {}
    for (n, k), tokens in product(shapes, packed_tuning.TIMED):
        parts = segments(n, k, "cuda")
        for tile in packed_tuning.candidates(tokens, parts):
            jobs.setdefault((k, parts, tile), tokens)
    found = [
        pool.submit(compile_tile, layout, k, parts, tokens, tile)
        for (k, parts, tile), tokens in jobs.items()
    ]
    for future in found:
        future.result()


def tune_packed(
    models: Sequence[Model],
    dtype: torch.dtype,
    path: Path,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> tuple[Times, list[str]]:
    """Times all tiles at every weight but the heads, and writes the best to `path`, over what
    stands there or in the committed table; key -> first tokens of a bucket -> (us, tile), fastest
    first; and the tiles that were refused, with the reason.

    The file is written after every weight, so what is measured stays where the rest is cut off.
    Raises ConfigError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device, and none is visible to torch; leave it out.")
    from lockstep.kernels.linear.packed import refusal, run_tile

    table = {**packed_tuning.load(), **packed_tuning.load(path)}
    major, minor = torch.cuda.get_device_capability()
    shapes = sorted({(n, k) for model in models for _, n, k in model.weights[:-1]})
    residual = {(n, k) for model in models for _, n, k in model.weights if n == model.hidden}
    times: Times = {}
    refused = []
    workers = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done, (layout, (n, k)) in enumerate(product(TUNED, shapes)):
            progress(f"{layout} {n}x{k}", done, len(TUNED) * len(shapes))
            if (n, k) == shapes[0]:
                _compile(pool, layout, shapes)
            weights = packed_tuning.some_weights(partial(LAYOUTS[layout], n, k, "cuda"))
            parts = segments(n, k, "cuda")
            run = partial(run_tile, parts, (n, k) in residual)
            right = partial(refusal, parts)
            key = packed_tuning.key(weights[0], dtype, 10 * major + minor)
            table[key] = {}
            times[key] = {}
            for first, tokens in zip(packed_tuning.BUCKETS, packed_tuning.TIMED, strict=True):
                found, bad = packed_tuning.tune(run, right, tokens, weights, parts, dtype)
                refused += [f"{layout} {n}x{k} {tokens}: {tile}: {bad[tile]}" for tile in bad]
                if found:
                    table[key][first] = found[0][1]
                times[key][first] = [(1e6 * seconds, str(tile)) for seconds, tile in found]
            tuning.save(table, path)
    return times, refused
