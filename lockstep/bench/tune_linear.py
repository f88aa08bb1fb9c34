"""Tuner of linear's tiles: time every candidate at every weight shape of the models.

Tiles affect only the speed, never the result, so a table can be tuned again on any machine.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.bench_types import ModelShape
from lockstep.kernels.linear import choose_split_k
from lockstep.progress import Progress, ignore_progress


def tune_linears(
    models: Sequence[ModelShape],
    dtype: torch.dtype,
    path: Path,
    progress: Progress = ignore_progress,
) -> dict[str, dict[int, float]]:
    """Time all tiles, and write the best to `path` over the entries of the committed table.

    Returns the time in us of the best tile by table key and by the first number of tokens of a
    bucket. Raises ConfigError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("tune needs a CUDA device, and none is visible to torch; leave it out.")
    from lockstep.kernels.linear import tuning
    from lockstep.kernels.linear.triton import launch

    table = {**tuning.load_table(), **tuning.load_table(path)}
    arch = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
    shapes = sorted({(n, k) for model in models for _, n, k in model.weights})
    residual = {(n, k) for model in models for _, n, k in model.weights if n == model.hidden}
    times: dict[str, dict[int, float]] = {}
    for done, (n, k) in enumerate(shapes):
        progress(f"{n}x{k}", done, len(shapes))
        weights = tuning.random_weights(n, k, dtype)
        key = f"{arch}/{str(dtype).removeprefix('torch.')}/{n}x{k}"
        run = partial(launch, allow_partials=(n, k) in residual)
        table[key] = {}
        times[key] = {}
        for first, tokens in zip(tuning.BUCKETS, tuning.TIMED, strict=True):
            seconds, tile = tuning.tune(run, tokens, weights, choose_split_k(n, k, "cuda"))[0]
            table[key][first] = tile
            times[key][first] = 1e6 * seconds
        # After each shape, so that an interrupted run keeps its measurements.
        tuning.save_table(table, path)
    return times
